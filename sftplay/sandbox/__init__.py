"""The box for programs that a model wrote: they run with limits, out of reach of everything else, and are judged.

`pool.Sandbox` takes jobs (a program and its tests) and gives verdicts in the same order. It knows nothing of rewards.

The program's process answers calls with plain data over a socket. What it gives is compared in this process, or by
tests that run in another box. So it never sees what is expected, and an object that equals everything is data here.

What it does not protect against:

- A hole in the kernel. All boxes share the machine's kernel; a virtual machine would not. The filter of system calls
  leaves less of it to attack.
- Tests that hand the program an object (a class of its own, a function): they run in the program's own process
  (`mode: in_process` in the verdict), and a program that is made to cheat can make such a test pass.
- A program that solves only the inputs that it was shown. Keep some tests hidden.
- `landlock` with its owner killed: what runs in its boxes stays until its processor time is used up. `bwrap` ends it.
- Use of the machine within the limits: several boxes at once may take processes x memory_bytes each, and slow down what
  else runs. Wrong timeouts follow where the machine is overloaded.
- Measuring the machine: the program sees its processor, kernel version, clock and load, and may guess from times.
- Trusted parts: `tests` and `setup` are taken for the user's own. They run in a box too, but may say what they like.
- `executor: none`, which isolates nothing.
"""
