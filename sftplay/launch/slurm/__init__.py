"""A run as a job of SLURM: its job file, the commands of the scheduler, and the process that lives inside the job."""
