from pathlib import Path

from tokenloom.services.engine.records.identity import supervisor_of


def test_supervisors_of_one_host_name_and_path_differ_by_directory_and_boot(tmp_path: Path) -> None:
    first, boot = tmp_path / "first" / "engine-0.json", tmp_path / "boot"
    second = tmp_path / "second" / "engine-0.json"
    for path in (first, second):
        path.parent.mkdir()
    boot.write_text("one")
    assert supervisor_of(first, boot) == supervisor_of(first, boot)
    seen = {supervisor_of(first, boot)}
    boot.write_text("another host with this name")
    seen.add(supervisor_of(first, boot))
    # What a second container has at the same path.
    first.parent.rename(tmp_path / "elsewhere")
    second.parent.rename(first.parent)
    seen.add(supervisor_of(first, boot))
    assert len(seen) == 3
    assert supervisor_of(first, tmp_path / "none").endswith("engine-0.json")
