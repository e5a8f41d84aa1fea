"""Configs: the differences between runs, every file in full, and versions."""

from collections.abc import Sequence
from pathlib import Path

from fedlight.report.parts import Code, Part, Section, Table, shortened
from fedlight.runs import facts
from fedlight.runs.run import Run, read_recipe
from fedlight.support.files import read_text

SAME_IN_ALL = "the same in all"
MOST_METHODS = 12
LONGEST = 60  # characters of a value in the table
PACKAGES = ("fedlight", "python", "torch", "lightning", "transformers", "peft")


def section(runs: Sequence[Run]) -> Section | None:
    """Return the differences between the runs that have trained, then all configs, folded."""
    with_config = [run for run in runs if run.config()]
    first_seeds = list({run.method: run for run in reversed(with_config)}.values())[::-1]
    trained = [run for run in first_seeds if run.command in ("fit", "")]
    parts: list[Part] = []
    if len(trained) > 1:
        parts.append(difference(trained[:MOST_METHODS], len(trained)))
    if table := versions(runs):
        parts.append(table)
    parts += [Code(f"{run.label}: config.yaml", config_text(run)) for run in first_seeds]
    if not parts:
        return None
    intro = "RUN stands for the folder of the run."
    if len(with_config) > len(first_seeds):
        intro += " Of several seeds the first one's config is shown."
    return Section("configuration", "Configuration", intro, parts)


def difference(runs: Sequence[Run], number: int) -> Table:
    """Return a table of the settings that differ between runs; a dash where a run has none."""
    flats = [{key: facts.under(_root(run), value) for key, value in facts.flat(run.config())} for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    keys.pop("ckpt_path", None)  # of a resumed run
    texts = [
        {key: shortened("null" if v is None else str(v), LONGEST) for key, v in f.items()} for f in flats
    ]
    lines = [
        [key, *(text.get(key, "-") for text in texts)]
        for key in keys
        # By repr: lists cannot be in a set, and a text "1" is another setting than the number.
        if len({repr(flat.get(key, SAME_IN_ALL)) for flat in flats}) > 1
    ]
    caption = "Whatever is not listed has the same value in all of these runs."
    if number > len(runs):
        caption += f" The first {len(runs)} of {number} runs."
    header = ["setting", *(run.method for run in runs)]
    return Table("What differs", header, lines, caption, folded=len(lines) > 25)


def _root(run: Run) -> Path:
    return Path(str(facts.within(run.config(), "trainer", "default_root_dir") or run.folder))


def config_text(run: Run) -> str:
    """Return the text of the config file, without the folder of the run."""
    name = run.config_file()
    text = read_text(run.folder / name, errors="replace") if name else ""
    return str(facts.under(run.folder, facts.under(_root(run), text)))


def versions(runs: Sequence[Run]) -> Table | None:
    """Return a line for each set of versions, with the machines in words."""
    records = [(run.method, run.record()) for run in runs]
    if not any(
        isinstance(record.get("versions"), dict) for _, record in records
    ):  # then those of the recipes
        records = [
            (home.name, read_recipe(home).json("results.json")) for home in {run.home: 0 for run in runs}
        ]
    groups: dict[tuple[str, ...], dict[str, None]] = {}  # line -> methods, each once and in their order
    for name, record in records:
        packages = record.get("versions")
        if isinstance(packages, dict):
            line = *(str(packages.get(package, "-")) for package in PACKAGES), str(record.get("machine", "-"))
            groups.setdefault(line, {})[name] = None
    if not groups:
        return None
    lines = [[", ".join(m) if len(m) <= 4 else f"{len(m)} runs", *line] for line, m in groups.items()]
    return Table("Versions", ["runs", *PACKAGES, "machine"], lines)
