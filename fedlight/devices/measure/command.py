"""``fedlight device measure --name NAME [--seconds S] [--watts W] [--force] ...``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedlight.support.console import OneLineArguments

ABOUT = """Measure this machine and write its profile as a device, for a fleet or a plan:

  fedlight device measure --name my_laptop
  fedlight plan --config selector.yaml --federated.fleet '{class_path: Fleet, init_args: {devices: {my_laptop: 1}}}'

Let nothing else run meanwhile. The profile is written to devices/ in the current folder, where its name is looked up."""


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight device``."""
    options = make_parser().parse_args(argv)
    from fedlight.devices.measure.profile import is_busy, profile_file, profile_text
    from fedlight.devices.measure.trial import measure
    from fedlight.support.files import refuse_unwritable, write_whole

    file = profile_file(options.name, options.folder, options.force)
    for key in ("watts", "download_mbps", "upload_mbps"):
        value = getattr(options, key)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{key.replace('_', '-')} {value}: give a number above 0")
    refuse_unwritable(options.folder, "--folder")
    print(f"measuring this machine for {options.seconds:g} s or a little longer", flush=True)
    trial = measure(options.seconds, options.device)
    text = profile_text(options.name, trial, options.watts, options.download_mbps, options.upload_mbps)
    write_whole(file, text)
    print(f"{text}{file} is written")
    if is_busy(trial):
        print(f"other work kept {trial.load:.1f} cores busy: measure again on an idle machine, with --force")
    if trial.watts is None and options.watts is None:
        print(
            f"watts is null, as {trial.no_watts}: a run refuses the profile until a number is written in; --watts "
            "gives the power drawn in training"
        )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight device``."""
    parser = OneLineArguments("fedlight device", description="Devices that are emulated.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="measure", required=True)
    trial = commands.add_parser(
        "measure",
        help="write a profile of this machine, in two minutes",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    trial.add_argument("--name", required=True, help="name of the device, and of its file")
    trial.add_argument("--seconds", type=float, default=120.0, metavar="S", help="time for the trial: 120")
    trial.add_argument(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda",
        help="what to measure: the GPU where there is one",
    )
    trial.add_argument(
        "--watts", type=float, metavar="W", help="power drawn in training, where it cannot be measured"
    )
    trial.add_argument(
        "--download-mbps", type=float, metavar="M", help="megabits a second from the server; not measured"
    )
    trial.add_argument(
        "--upload-mbps", type=float, metavar="M", help="megabits a second to the server; not measured"
    )
    trial.add_argument(
        "--folder", type=Path, default=Path("devices"), help="where the profile is written: devices"
    )
    trial.add_argument("--force", action="store_true", help="replace a profile of this name")
    return parser
