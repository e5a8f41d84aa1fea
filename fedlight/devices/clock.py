"""Virtual clock of a round: who takes part, the costs of each client, and the duration of the round.

A visit downloads, computes and uploads, one after the other, at the constant speeds of its device. The server asks more
clients than it wants ("over-selection") and closes the round when it has enough or the deadline is over: Bonawitz et
al., "Towards Federated Learning at Scale: System Design", MLSys 2019, https://arxiv.org/abs/1902.01046, section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fedlight.devices.device import Device

IDLE_SECONDS = 600.0
"""Wait of the server after a round without clients and without a deadline; lets traces move on."""


@dataclass(frozen=True)
class Job:
    """Work of one client in a round; several visits of a client are one job.

    Attributes:
        client_id: the client; no two jobs of a round have the same.
        device: device that runs it.
        flops: floating point operations of the training.
        bytes_down: payload from the server.
        bytes_up: payload to the server.
        fits: whether the training fits into the device's memory.
    """

    client_id: str
    device: Device
    flops: float
    bytes_down: int
    bytes_up: int
    fits: bool = True

    @property
    def phases(self) -> tuple[float, float, float]:
        """Seconds to download, to compute and to upload."""
        device = self.device
        return (
            device.download_seconds(self.bytes_down),
            device.compute_seconds(self.flops),
            device.upload_seconds(self.bytes_up),
        )

    @property
    def seconds(self) -> float:
        """Seconds from the first byte down to the last byte up."""
        download, compute, upload = self.phases
        return download + compute + upload


@dataclass(frozen=True)
class Outcome:
    """Result of a job, with its costs until it was done or stopped.

    Attributes:
        client_id: the client.
        reason: "" for a client that took part, else ``absent`` (not there when asked), ``out_of_memory`` (declines before
            the download), ``left`` (gone before it was through), ``late`` (not through at the deadline) or ``surplus``
            (the server had enough from others). The first two spend nothing.
        download_seconds: time spent downloading.
        compute_seconds: time spent computing.
        upload_seconds: time spent uploading.
        bytes_down: received; the part that had come, rounded down, of a download that was cut off.
        bytes_up: sent; the part that had gone, rounded down, of an upload that was cut off.
        flops: computed; a part where it was cut off.
        joules: the device's watts times the seconds spent.
    """

    client_id: str
    reason: str
    download_seconds: float = 0.0
    compute_seconds: float = 0.0
    upload_seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    flops: float = 0.0
    joules: float = 0.0


def run_round(
    now_seconds: float,
    jobs: Sequence[Job],
    wanted: int,
    deadline_seconds: float | None,
    draw: tuple[int, int],
) -> tuple[list[Outcome], float]:
    """Run every job on the virtual clock.

    The round ends with the ``wanted``-th client that finishes. If fewer finish, it ends at the deadline if a client is still
    at work then, else with the last one to finish or leave. With no client at work the server waits for the deadline, or
    :data:`IDLE_SECONDS` without one. A client that finishes exactly at the deadline, or when it leaves, is in time; of
    several that finish at once, the lower client id comes first.

    Args:
        now_seconds: virtual time of the round's beginning, at least 0.
        jobs: one for each client that was asked.
        wanted: number of clients that the server wants, at least 1.
        deadline_seconds: most that the round may take, above 0; None without a limit.
        draw: (seed of the run, round).

    Returns:
        Outcomes in the order of ``jobs``, and the seconds that the round took.

    Examples:
        >>> fast = Device("fast", memory_gib=8, tflops=2, utilisation=0.5, download_mbps=8, upload_mbps=8, watts=5)
        >>> slow = Device("slow", memory_gib=8, tflops=1, utilisation=0.1, download_mbps=8, upload_mbps=8, watts=3)
        >>> jobs = [Job(d.name, d, flops=2e12, bytes_down=10**6, bytes_up=10**6) for d in (fast, slow)]
        >>> outcomes, seconds = run_round(0.0, jobs, wanted=2, deadline_seconds=11.0, draw=(0, 0))
        >>> [(o.client_id, o.reason, o.compute_seconds, o.bytes_up, o.joules) for o in outcomes], seconds
        ([('fast', '', 2.0, 1000000, 20.0), ('slow', 'late', 10.0, 0, 33.0)], 11.0)
    """
    reasons = {job.client_id: "" for job in jobs}
    stays: dict[str, float] = {}
    for job in jobs:
        until = job.device.availability.available_until(now_seconds, *draw, job.client_id)
        if until is None or not job.fits:
            reasons[job.client_id] = "absent" if until is None else "out_of_memory"
        else:
            stays[job.client_id] = until - now_seconds
    at_work = {job.client_id: job.seconds for job in jobs if job.client_id in stays}
    deadline = inf if deadline_seconds is None else deadline_seconds
    through = [name for name, needs in at_work.items() if needs <= min(stays[name], deadline)]
    through.sort(key=lambda name: (at_work[name], name))  # whatever the order of the jobs
    enough = len(through) >= wanted
    if enough:
        end = at_work[through[wanted - 1]]
    elif at_work:
        # Nobody else can arrive.
        end = min(deadline, max(min(at_work[name], stays[name]) for name in at_work))
    else:
        end = IDLE_SECONDS if deadline_seconds is None else deadline_seconds
    for name in at_work.keys() - set(through[:wanted]):
        # A device that would leave after the end of the round was stopped by that end.
        unfinished = at_work[name] > stays[name]
        reasons[name] = "left" if unfinished and stays[name] <= end else "surplus" if enough else "late"
    outcomes = [
        outcome_of(job, reasons[job.client_id], min(end, stays.get(job.client_id, 0.0))) for job in jobs
    ]
    return outcomes, end


def end_of(job: Job, now_seconds: float, draw: tuple[int, int]) -> tuple[float, str]:
    """Return when a client is through that is asked at ``now_seconds``, and why it drops out then; "" if it does not.

    Nobody stops it: it is ``absent`` or ``out_of_memory`` at once, ``left`` when its device goes, or through. Other
    arguments as for `run_round`.

    Examples:
        >>> phone = Device("phone", memory_gib=8, tflops=1, utilisation=0.5, download_mbps=8, upload_mbps=8, watts=5)
        >>> end_of(Job("a", phone, flops=1e12, bytes_down=10**6, bytes_up=2 * 10**6), 100.0, draw=(0, 0))
        (105.0, '')
    """
    until = job.device.availability.available_until(now_seconds, *draw, job.client_id)
    if until is None or not job.fits:
        return now_seconds, "absent" if until is None else "out_of_memory"
    if job.seconds > until - now_seconds:
        return until, "left"
    return now_seconds + job.seconds, ""


def outcome_of(job: Job, reason: str, seconds: float) -> Outcome:
    """Return the costs of ``job`` when it is done or stopped after ``seconds``, whichever comes first."""
    if reason in ("absent", "out_of_memory"):
        return Outcome(job.client_id, reason)
    download, compute, upload = job.phases
    if seconds < job.seconds:
        download = min(download, seconds)
        compute = min(compute, seconds - download)
        upload = min(upload, seconds - download - compute)
    down, done, up = (
        spent / whole if whole else 1.0  # a phase without work is done
        for spent, whole in zip((download, compute, upload), job.phases, strict=True)
    )
    return Outcome(
        job.client_id,
        reason,
        download_seconds=download,
        compute_seconds=compute,
        upload_seconds=upload,
        bytes_down=int(job.bytes_down * down),
        bytes_up=int(job.bytes_up * up),
        flops=job.flops * done,
        joules=job.device.watts * (download + compute + upload),
    )
