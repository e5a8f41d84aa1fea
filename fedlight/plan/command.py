"""``fedlight plan --config FILE [--shape NAME] [--examples N] [--json FILE] [--KEY VALUE ...]``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedlight.plan.shapes import known_shapes
from fedlight.support.console import OneLineArguments
from fedlight.support.files import write_json

ABOUT = """Which devices could take part in a run, and what a visit would cost them; from the config alone, without weights.

  fedlight plan --config selector.yaml --federated.fleet devices/fleets/phones.yaml --shape gemma_2b

Keys of the config are set as for `fedlight fit`. Without a fleet, all devices that come with fedlight are looked at."""


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight plan``."""
    parser = OneLineArguments(
        "fedlight plan",
        usage="fedlight plan --config FILE [--shape NAME] [--examples N] [--json FILE] [--KEY VALUE ...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--shape", metavar="NAME", help=f"a public architecture: {', '.join(known_shapes())}")
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="examples of a client; needed where federated.local_steps is not set",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options, settings = parser.parse_known_args(argv)  # keys of the config are left over
    from fedlight.plan.plan import as_json, make_plan, show  # late: --help and wrong options need no torch

    plan = make_plan(settings, options.shape, options.examples)
    if options.json is not None:
        write_json(options.json, as_json(plan))
    show(plan)
