"""Pyright's report is summed up; pyright itself does not run here."""

from pathlib import Path
from typing import Any

from tools.figures.editor import summarize


def _diagnostic(file: Path, line: int, message: str, rule: str, severity: str = "error") -> dict[str, Any]:
    start = {"line": line, "character": 0}
    return {"file": str(file), "severity": severity, "message": message, "rule": rule, "range": {"start": start}}


def test_a_linked_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "a.py").touch()
    (tmp_path / "linked").symlink_to("services")
    ours = 'Import "tokenloom.services.b" could not be resolved'
    report = {
        "version": "1.2.3",
        "summary": {"filesAnalyzed": 2},
        "generalDiagnostics": [
            _diagnostic(tmp_path / "services" / "a.py", 1, ours, "reportMissingImports"),
            _diagnostic(tmp_path / "linked" / "a.py", 1, ours, "reportMissingImports"),
            _diagnostic(
                tmp_path / "services" / "a.py",
                2,
                'Import "grpc" could not be resolved from source',
                "reportMissingModuleSource",
                "warning",
            ),
            _diagnostic(
                tmp_path / "services" / "a.py", 3, '"x" is unknown import symbol', "reportAttributeAccessIssue"
            ),
            _diagnostic(tmp_path / "services" / "a.py", 4, "wrong type", "reportArgumentType"),
        ],
    }
    found = summarize(report, tmp_path.resolve())
    assert (found.unresolved, found.unresolved_ours, found.unknown_names, found.errors) == (2, 1, 1, 3)
    assert found.unresolved_files == ["services/a.py"]
