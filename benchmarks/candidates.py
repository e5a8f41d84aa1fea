"""Candidates that the clients of a toy FewFedPIT run made up: how many tries survive, and how many answers are right.

The embedded world knows the right answer to every question, so the rows that clients write can be marked. For each stage and
seed of `fedlight run fewfedpit` or `fewfedpit_rule`, from the records of its rounds (``synthetic/round_*.jsonl``):

* tried, survived: questions that were tried, and the share of them that came through the filters;
* first, last: candidates of all clients of a round, in the mean of the first and the last five rounds;
* short, visits: clients' visits with at most as many candidates as they keep, which leaves no choice, and all visits;
* right: share of candidates with the right answer;
* asked: different questions of the test that a candidate repeats;
* with ``--rule``: the share that is right of candidates about shared topics (also in the first and the last third of the
  rounds), about topics held out for the test, and about facts; and the share of candidates about held-out topics.

Run: python benchmarks/candidates.py FOLDER [--stages fewfedpit_50] [--rule] [--json FILE]
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.toy.instructions import DOMAINS, answer, instructions, topics
from fedlight.toy.rules import is_fact, is_held_out


class Candidate(NamedTuple):
    """Row that a client wrote.

    Attributes:
        round: 0 for the first.
        question: with its topic.
        kind: ``shared``, ``held`` or ``fact``; ``none`` where it is about no topic of the domain.
        right: whether its answer is the world's.
    """

    round: int
    question: str
    kind: str
    right: bool


class Records(NamedTuple):
    """Records of a stage.

    Attributes:
        tried: questions, of all rounds.
        visits: candidates of each client in each round that it wrote some.
        candidates: of all rounds, in their order.
    """

    tried: int
    visits: Counter[tuple[int, str]]
    candidates: list[Candidate]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the counts of each stage and seed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the recipe's run")
    parser.add_argument("--stages", nargs="+", default=["fewfedpit_50"])
    parser.add_argument("--domain", default="kitchen", choices=sorted(DOMAINS))
    parser.add_argument("--rule", action="store_true", help="topics share a rule, as in fewfedpit_rule")
    parser.add_argument("--keep", type=int, default=16, help="rows that a client keeps in a round")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args(argv)
    seeds = sorted(options.folder.glob("seed[0-9]*"))
    if not seeds:
        parser.error(f"{options.folder} has no folder seed0: give that of the recipe's run")
    rows = []
    for stage in options.stages:
        for folder in seeds:
            seed = int(folder.name.removeprefix("seed"))
            records = read(folder / stage / "synthetic", seed, options.domain, options.rule)
            rows.append({"stage": stage, "seed": seed, **counts(records, seed, options.domain, options.keep)})
            if options.rule:
                rows[-1] |= counts_by_kind(records)
            print(
                "  ".join(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in rows[-1].items()
                )
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read(folder: Path, seed: int, domain: str, rule: bool) -> Records:
    """Return the records of a stage's rounds.

    Raises:
        SystemExit: there are no records.
    """
    files = sorted(folder.glob("round_*.jsonl"))
    if not files:
        raise SystemExit(f"{folder} has no records of rounds: the stage makes no rows, or has not run")
    known = {topic: answer(seed, domain, topic, int(rule)) for topic in topics(domain)}
    tried, visits, candidates = 0, Counter[tuple[int, str]](), []
    for number, file in enumerate(files):
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if "counts" in line:  # a header; each client that trains a separate model has one
                tried += line["counts"]["tried"]
                visits.update({(number, client): 0 for client in line["clients"]})
                continue
            if "dropped" in line:
                continue
            visits[number, line["client"]] += 1
            fields = line["fields"]
            name, area = fields["instruction"].split()[-2:]
            right = known.get((area, name)) == fields["response"]
            candidates.append(
                Candidate(number, fields["instruction"], _kind(domain, area, name, rule), right)
            )
    return Records(tried, visits, candidates)


def _kind(domain: str, area: str, name: str, rule: bool) -> str:
    if (area, name) not in topics(domain):
        return "none"
    if rule and is_fact((area, name)):
        return "fact"
    return "held" if rule and is_held_out(DOMAINS[domain].areas, (area, name)) else "shared"


def counts(records: Records, seed: int, domain: str, keep: int) -> dict[str, Any]:
    """Return how many candidates there are, and how good they are."""
    rounds = _rounds(records)
    made = Counter(each.round for each in records.candidates)
    test = {
        f"{row['instruction']} {row['input']}"
        for row in instructions(split="test", seed=seed, domain=domain, topic_rows=4)
    }
    return {
        "tried": records.tried,
        "survived": len(records.candidates) / records.tried,
        "first": sum(made[each] for each in range(5)) / 5,
        "last": sum(made[each] for each in range(rounds - 5, rounds)) / 5,
        "short": sum(number <= keep for number in records.visits.values()),
        "visits": len(records.visits),
        "right": _share_right(records.candidates),
        "asked": len(test & {each.question for each in records.candidates}),
    }


def counts_by_kind(records: Records) -> dict[str, Any]:
    """Return the shares that are right by kind of topic, and the share that is about held-out topics."""
    third = _rounds(records) // 3
    of_kind = {
        kind: [each for each in records.candidates if each.kind == kind]
        for kind in ("shared", "held", "fact")
    }
    return {
        **{f"{kind} right": _share_right(found) for kind, found in of_kind.items()},
        "shared right, first third": _share_right([each for each in of_kind["shared"] if each.round < third]),
        "shared right, last third": _share_right(
            [each for each in of_kind["shared"] if each.round >= 2 * third]
        ),
        "held": len(of_kind["held"]) / max(1, len(records.candidates)),
    }


def _rounds(records: Records) -> int:
    return 1 + max(number for number, _ in records.visits)


def _share_right(found: list[Candidate]) -> float | None:
    return sum(each.right for each in found) / len(found) if found else None


if __name__ == "__main__":
    main()
