"""How scripts of tests start the two ranks of a run: forked from one process that has imported everything."""

START = """
import os
from sftplay.tasks import worker

def start(folder, port, rank):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        code = 1
        try:
            code = worker.main(folder)
        finally:
            os._exit(code)
    return child
"""
"""Text for a script; the child's pid comes back."""
