"""schemathesis on /openapi.json: generated requests, right and wrong, get the answers that the document promises."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

URL = os.environ["TOKENLOOM_URL"]
ADMIN = {"Authorization": f"Bearer {os.environ['TOKENLOOM_ADMIN_KEY']}"}
CONFIG = """
[checks]
# What a schema cannot say is refused too: a full context, a token that the model has not, a grammar that is none.
positive_data_acceptance.expected-statuses = ["2xx", 400, 404, 422]
"""
# A deadline that no engine could keep is refused with 503, as when too many others wait, which a schema cannot say.
HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    seconds = case.body.get("ttft_deadline") if isinstance(case.body, dict) else None
    if isinstance(seconds, (int, float)) and 0 < seconds < 60:
        case.body["ttft_deadline"] = 60
"""


def main() -> None:
    Path("schemathesis.toml").write_text(CONFIG)
    Path("hooks_of_schemathesis.py").write_text(HOOKS)
    generated = run("--exclude-tag=admin", "--seed=1") + run("--exclude-tag=admin", "--seed=2")
    try:
        of_admin = run("--include-tag=admin", "--seed=1", f"--header=Authorization: {ADMIN['Authorization']}")
    finally:
        for path in ("/wake_up", "/resume"):
            urllib.request.urlopen(urllib.request.Request(URL + path, method="POST", headers=ADMIN)).close()
    print(f"{generated} generated requests, and {of_admin} to the admin routes, no failure")


def run(*options: str) -> int:
    """How many requests it made; ends with its status if one failed."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", URL + "/openapi.json", "--no-color"]
    command += ["--max-examples=25", "--request-timeout=60", *options]
    hooks = {"SCHEMATHESIS_HOOKS": "hooks_of_schemathesis", "PYTHONPATH": "."}
    done = subprocess.run(
        command, env=os.environ | hooks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout)
    if done.returncode:
        sys.exit(done.returncode)
    (generated,) = re.findall(r"([\d,]+) generated", done.stdout)
    return int(generated.replace(",", ""))


if __name__ == "__main__":
    main()
