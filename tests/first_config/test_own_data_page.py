import re
import shlex
from pathlib import Path

import pytest
import yaml

from fedlight.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs/own_data.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"`(\w+\.(?:jsonl|csv))`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
BLOCKS = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = re.findall("^fedlight init.*$", BLOCKS, re.MULTILINE)


def test_the_page_has_files_and_commands_of_each_kind():
    assert sorted(FILES) == ["asked.jsonl", "pairs.csv", "talks.jsonl", "votes.jsonl"]
    assert len(COMMANDS) == len(set(COMMANDS)) == 8


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_writes_a_config_that_passes_checks(command, byte_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    arguments = [word for word in shlex.split(command)[1:] if word != "--dry-run"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--model", byte_model, "--dry-run"])
    assert end.value.code == 0, capsys.readouterr().out
    (written,) = tmp_path.glob("*.yaml")
    config = yaml.safe_load(written.read_text())
    assert config["data"]["init_args"]["partition"] == {"by": "client"}
