"""Ranks that are processes, forked from this one."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch

from flatparam_plan.errors import PlanError

__all__ = ["on_forked_ranks"]

_PATIENCE: Final = 600


def on_forked_ranks(world_size: int, work: Callable[[int, str], Any]) -> list[Any]:
    """Run `work` on `world_size` ranks, which are processes of one thread each, and return the results by rank.

    Args:
        work: is called with the rank, and with the path of a file by which the ranks can find each other.

    Raises:
        PlanError: if one of them fails, or if they take longer than ten minutes.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Who has threads is warned of forking; the ranks use none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_be_a_rank, args=(rank, os.path.join(folder, "store"), work, sending), daemon=True
            )
            for rank, (_, sending) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sending in pipes:
            sending.close()
        try:
            return _heard([receiving for receiving, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _heard(pipes: list[Connection]) -> list[Any]:
    """The result of every rank; the first failure is raised."""
    said: dict[int, Any] = {}
    end = time.monotonic() + _PATIENCE
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise PlanError(
                f"this-machine: expected ranks to run their steps within {_PATIENCE} s, found that they did not; plan "
                "a smaller program, or choose a different profile"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection), "nothing else is waited for"
            rank = open_pipes.pop(pipe)
            try:
                said[rank], error = pipe.recv()
            except EOFError:
                error = "it ended without a word: was it out of memory?"
            if error:
                raise PlanError(
                    f"this-machine: expected {len(pipes)} ranks to run steps of the program, found that rank {rank} "
                    f"failed: {error}"
                )
    return [said[rank] for rank in range(len(pipes))]


def _be_a_rank(rank: int, store: str, work: Callable[[int, str], Any], sending: Connection) -> None:
    """Do the work, and send what it returns, or what went wrong."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        # What a program prints is no part of a plan.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sending.send((work(rank, store), ""))
    except BaseException as error:
        told = str(error) if isinstance(error, PlanError) else "".join(traceback.format_exception_only(error))
        sending.send((None, told.strip()))
