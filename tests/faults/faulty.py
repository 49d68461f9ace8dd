"""A callback that lets a fault happen, once: in a rank, at a place and a step that the environment names.

FAULT=<place>:<step>:<rank>:<what>, with FAULT_MARK a file that says that it has happened. A test copies this file into
its working directory.
"""

import os
import pathlib
import signal
import time

from slurm_train.train.checkpoint import CheckpointStore


class Faulty:
    def __init__(self):
        self.place, step, rank, self.what = os.environ.get("FAULT", ":0:-1:").split(":")
        self.step, self.rank = int(step), int(rank)
        self.pause = float(os.environ.get("PAUSE", 0))

    def on_start(self, context):
        self.due("start", context, 0)
        if self.place == "save":
            publish = CheckpointStore._publish
            CheckpointStore._publish = lambda *words: (self.due("save", context, self.step), publish(*words))[1]
            if context.world.info.rank:  # whose part of a checkpoint is its shards
                write = CheckpointStore._write_shards
                CheckpointStore._write_shards = lambda *words: (self.due("save", context, self.step), write(*words))[1]

    def on_step(self, context):
        time.sleep(self.pause)
        self.due("step", context, context.position.step)

    def on_epoch(self, context, metrics):
        self.due("epoch", context, self.step)

    def on_end(self, context):
        self.due("end", context, self.step)

    def due(self, place, context, step):
        if (place, step) != (self.place, self.step) or self.rank not in (context.world.info.rank, -2):
            return
        mark = pathlib.Path(os.environ["FAULT_MARK"])
        if self.rank != -2 and mark.exists():
            return
        mark.write_text(str(time.time()))
        happen(self.what, context)


def happen(what, context):
    if what == "raise":
        raise ValueError("a bad sample")
    if what == "exit":
        os._exit(0)
    if what == "hang":
        time.sleep(3600)
    if what == "clock":
        real, begin = time.time, time.time()
        time.time = lambda: real() - 3600 - begin % 1
        return
    if what == "controller":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    if what == "slow disk":
        sync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.3), sync(descriptor))[1]
        return
    os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
    time.sleep(0.1)
