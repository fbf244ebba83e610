"""Two faults on purpose, for `bench-invariance --fault`: what its comparison must notice. On PYTHONPATH, by BROKEN.

`divisor`: each rank divides its losses by its own label tokens in place of all ranks'. `averaging`: the Trainer is told
not to average over devices, as its own default was before transformers 5.
"""

import os
import sys

if "sftplay.tasks.worker" in sys.orig_argv:
    from transformers import Trainer, TrainingArguments

    made, counted = TrainingArguments.__post_init__, Trainer._get_num_items_in_batch

    def without_averaging(self):
        made(self)
        self.average_tokens_across_devices = False

    def own_count(self, batches, device):
        whole = counted(self, batches, device)
        return whole if whole is None else sum((batch["labels"][:, 1:] != -100).sum() for batch in batches) * 1.0

    if os.environ.get("BROKEN") == "averaging":
        TrainingArguments.__post_init__ = without_averaging
    if os.environ.get("BROKEN") == "divisor":
        Trainer._get_num_items_in_batch = own_count
