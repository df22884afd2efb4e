"""Progress bars: one for each policy, with its losses as they fall; in a log file, a line now and then."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SMOOTHING = 0.9  # weight of the past in the training loss that is shown


class Bars:
    """A watcher that draws. Use it as a context manager.

    Args:
        console: Where to.
        policies: Their names.
        steps: Steps of each, over all seeds.
    """

    def __init__(self, console: Console, policies: list[str], steps: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("training {task.fields[training]}  validation {task.fields[validation]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        width = max(map(len, policies))
        self._tasks: dict[str, TaskID] = {
            name: self._progress.add_task(name.ljust(width), total=steps, training="     ", validation="     ")
            for name in policies
        }
        self._smooth: dict[str, float] = {}
        self._validated: dict[str, float] = {}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def trained(self, policy: str, loss: float) -> None:
        """Advance a policy's bar by a step."""
        smooth = SMOOTHING * self._smooth.get(policy, loss) + (1 - SMOOTHING) * loss
        self._smooth[policy] = smooth
        self._progress.update(self._tasks[policy], advance=1, training=f"{smooth:.3f}")

    def validated(self, policy: str, loss: float) -> None:
        """Show a policy's validation loss."""
        self._progress.update(self._tasks[policy], validation=f"{loss:.3f}")
        self._validated[policy] = loss
        if len(self._validated) == len(self._tasks):
            if not self._progress.console.is_terminal:
                # Bars that cannot move are drawn once, at the end; a log should show sooner that something happens.
                task = next(task for task in self._progress.tasks if task.id == self._tasks[policy])
                losses = "  ".join(f"{name} {loss:.4f}" for name, loss in self._validated.items())
                self._progress.console.print(
                    f"{task.completed:.0f}/{task.total:.0f}  validation  {losses}", highlight=False, soft_wrap=True
                )
            self._validated.clear()
