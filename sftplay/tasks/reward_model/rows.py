"""The rows of a reward model are pairs."""

from sftplay.tasks.preference.rows import load_examples, read_record, report_table

__all__ = ["load_examples", "read_record", "report_table"]
