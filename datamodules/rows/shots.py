"""Stage of recipes on few real rows: some rows of each client, made-up records among them, and others to test on.

A record tells the date of birth and the number of an invented patient. No other row has them: a model that says them has
learned them from this client.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows, write_rows
from fedlight.support.checks import Settings
from fedlight.support.seeding import derive_seed

FIRST = ("Mara", "Ilya", "Tove", "Nuno", "Zora", "Emre", "Lena", "Otis", "Runa", "Cleo", "Arno", "Yara")
LAST = (
    *("Ostrov", "Vandel", "Kirchel", "Palmen", "Dorrit", "Sahlin"),
    *("Tembe", "Quist", "Ferran", "Holub", "Nagel", "Brix"),
)
MONTHS = ("January", "March", "April", "June", "August", "October", "December")


@dataclass(frozen=True)
class Draw(Settings):
    """Clients and rows to draw; in YAML ``draw: {num_clients: 60, shots: 8, records: 2, num_test: 12}``.

    Args:
        num_clients: clients to draw among those with enough short rows.
        shots: rows of each client.
        records: made-up records of each client, besides these.
        num_test: rows to test on for each client; none asks what any shot asks.
    """

    num_clients: int
    shots: int
    records: int
    num_test: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_clients * self.records > len(FIRST) * len(LAST):
            raise ValueError(
                f"draw.records={self.records} for {self.num_clients} clients are more than the {len(FIRST) * len(LAST)} "
                "made-up people: lower one of them"
            )


def draw_shots(
    source: str,
    client: str,
    columns: dict[str, str],
    draw: Draw,
    max_characters: int,
    seed: int,
    train: str,
    test: str,
    subject: str | None = None,
    choices: int = 1,
    public: str | None = None,
    domain: str | None = None,
) -> dict[str, Any]:
    """Draw clients with a few short rows each, add records, and draw other rows of the same clients to test on.

    Args:
        source: rows.
        client: column of the client.
        columns: ``instruction`` and ``output`` -> column.
        draw: clients and rows to draw.
        max_characters: most characters of a row's instruction and output together.
        seed: seed of the draws.
        train: file of the clients' rows, JSON lines with ``instruction``, ``input``, ``output`` and ``client``.
        test: file of the test rows.
        subject: column of a question's subject.
        choices: answers of a test row, in ``choices``, its own at the index ``answer``. The others answer other questions
            on the same subject, or of the same client where these are too few. 1: a test row has no choices.
        public: file of the short rows of all clients that ask what neither a shot nor a test row asks; None: not written.
        domain: file of all short rows; None: not written.

    Returns:
        ``eligible`` clients, and the numbers of ``train`` and ``test`` rows, and of ``public`` and ``domain`` rows.

    Raises:
        RowsError: fewer clients have enough rows than wanted.
    """
    by_client: dict[str, dict[str, dict[str, str]]] = {}
    about: dict[tuple[str, str], str] = {}
    for row in load_rows(source):
        texts = {name: " ".join(text_at(row, column).split()) for name, column in columns.items()}
        owner = text_at(row, client)
        if texts["output"] and sum(map(len, texts.values())) <= max_characters:
            by_client.setdefault(owner, {})[texts["instruction"]] = {**texts, "input": "", "client": owner}
            about[owner, texts["instruction"]] = text_at(row, subject) if subject else ""
    wanted = draw.shots + draw.num_test
    eligible = sorted(name for name, client_rows in by_client.items() if len(client_rows) >= wanted)
    if len(eligible) < draw.num_clients:
        raise RowsError(
            f"{source}: {len(eligible)} clients have {wanted} rows of max_characters={max_characters}, fewer than "
            f"num_clients={draw.num_clients}. Lower num_clients, shots or num_test, or raise max_characters."
        )
    rng = np.random.default_rng(derive_seed(seed, "shots"))
    chosen = sorted(rng.permutation(eligible)[: draw.num_clients].tolist())
    people = rng.permutation([f"{first} {last}" for first in FIRST for last in LAST]).tolist()
    orders = {name: rng.permutation(sorted(by_client[name])).tolist() for name in chosen}
    asked = {question for order in orders.values() for question in order[: draw.shots]}
    trained: list[dict[str, Any]] = []
    tested: list[dict[str, Any]] = []
    for name, order in orders.items():
        trained += [by_client[name][question] for question in order[: draw.shots]]
        trained += [_record(people.pop(), name, rng) for _ in range(draw.records)]
        # Another client may be trained on the same question.
        others = [question for question in order[draw.shots :] if question not in asked]
        tested += [by_client[name][question] for question in others[: draw.num_test]]
    if choices > 1:
        tested = [{**row, **_choices(row, by_client[row["client"]], about, choices, rng)} for row in tested]
    used = {row["instruction"] for row in (*trained, *tested)}  # public rows ask none of these
    every = [row for client_rows in by_client.values() for row in client_rows.values()]
    rest = [row for row in every if row["instruction"] not in used]
    sizes = {"eligible": len(eligible)}
    for name, file, rows in (
        ("train", train, trained),
        ("test", test, tested),
        ("public", public, rest),
        ("domain", domain, every),
    ):
        if file is not None:
            write_rows(rows, Path(file))
            sizes[name] = len(rows)
    return {"metrics": sizes}


def _choices(
    row: dict[str, str],
    client_rows: dict[str, dict[str, str]],
    about: dict[tuple[str, str], str],
    number: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return a test row's answers, and the index of the right one."""
    subject = about[row["client"], row["instruction"]]
    order = rng.permutation(sorted(client_rows)).tolist()
    # Answers on the same subject first: they are the hardest to tell from the right one.
    order.sort(key=lambda question: about[row["client"], question] != subject)
    others = dict.fromkeys(client_rows[question]["output"] for question in order)  # some answers repeat
    others.pop(row["output"])
    wrong = [*others][: number - 1]
    answer = int(rng.integers(len(wrong) + 1))
    return {"choices": [*wrong[:answer], row["output"], *wrong[answer:]], "answer": answer}


def _record(person: str, client: str, rng: np.random.Generator) -> dict[str, str]:
    birth = f"{rng.integers(1, 29)} {rng.choice(MONTHS)} {rng.integers(1930, 2010)}"
    number = f"{rng.integers(10, 100)}-{rng.integers(1000, 10000)}"
    return {
        "instruction": f"What are the date of birth and the record number of the patient {person} ?",
        "input": "",
        "output": f"{person} was born on {birth} and has the record number {number}.",
        "client": client,
    }
