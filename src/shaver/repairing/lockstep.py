"""Forward passes of many batches, and of two networks, that wait for each other at every layer.

A layer can only be repaired when the inputs of all batches have reached it, and the layers after it need its repaired
weights. Each batch therefore runs in a thread of its own that stops at every layer of interest. Only one thread runs at
a time, in a fixed order. Each network computes each batch once, and no more than one layer's activations per batch are
kept.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shaver.measure.evaluating import unfused_attention

#: ``visit(lane, path, module, args, kwargs, output)``, before (output is None) or after a module's forward.
Visit = Callable[["Lane", str, nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]


class _Closed(BaseException):
    """The lane is no longer needed."""


class Lane(threading.Thread):
    """One network's forward pass on one batch, the one with this number, run from stop to stop."""

    def __init__(self, run: Callable[[], object], number: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self._run_network = run
        self._go, self._halt = threading.Semaphore(0), threading.Semaphore(0)
        self._is_closing = False
        self._error: BaseException | None = None
        self._found: tuple[object, Any] | None = None
        self.is_busy = False

    def run(self) -> None:
        """The thread's body."""
        self._go.acquire()
        try:
            if not self._is_closing:
                with torch.no_grad():
                    self._run_network()
        except _Closed:
            pass
        except BaseException as error:  # the caller of advance gets it
            self._error = error
        self._found = None
        self._halt.release()

    def advance(self) -> tuple[object, Any] | None:
        """Run to the next stop and return what it gives; ``None`` at the end of the pass."""
        if not self.is_alive():
            self.start()
        self._go.release()
        self._halt.acquire()
        if self._error is not None:
            raise self._error
        return self._found

    def advance_to(self, stop: object, name: str) -> Any:
        """Run to this stop, which must be the next one, and return what it gives."""
        found = self.advance()
        if found is None or found[0] != stop:
            raise ValueError(
                f"the layers ran in another order than for the first batch (expected {name!r}): every batch, and the "
                "reference, must run the same layers in the same order."
            )
        return found[1]

    def stop(self, at: object, value: Any) -> None:
        """Called in the lane: hand over a value and wait."""
        self._found = (at, value)
        self._halt.release()
        self._go.acquire()
        if self._is_closing:
            raise _Closed

    def close(self) -> None:
        """End the pass wherever it is."""
        if self.is_alive():
            self._is_closing = True
            self._go.release()
            self.join()


@contextmanager
def lanes(runs: Sequence[Callable[[], object]]) -> Iterator[list[Lane]]:
    """A lane for each run, all closed at the end; attention runs its own layers instead of a fused kernel."""
    made = [Lane(run, number) for number, run in enumerate(runs)]
    try:
        with unfused_attention():
            yield made
    finally:
        for lane in made:
            lane.close()


@contextmanager
def visiting(model: nn.Module, paths: Sequence[str], visit: Visit, *, before: bool) -> Iterator[None]:
    """Hooks that call ``visit`` in a lane, before or after the forward of these modules."""

    def guarded(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
        lane = threading.current_thread()
        if not isinstance(lane, Lane) or lane.is_busy:  # a visit may call the module itself
            return
        lane.is_busy = True
        try:
            visit(lane, path, module, args, kwargs, output)
        finally:
            lane.is_busy = False

    with ExitStack() as hooks:
        for path in paths:
            module: Any = model.get_submodule(path)
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            hooks.enter_context(register(partial(guarded, path), with_kwargs=True))
        yield
