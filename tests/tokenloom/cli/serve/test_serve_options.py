"""``serve --config``: who wins, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.checkpoints.whole_sound import write_whole_sound
from tests.checkpoints.whole_vision import write_whole_vision
from tests.parity.state_checkpoints import write_model
from tokenloom.cli.main import app
from tokenloom.cli.serve import prechecks
from tokenloom.cli.serve.serve_options import DECIDED, OFFERS, SETTINGS
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.runtime.host.options import options_of
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.layout import MeshOptions


def run(path: Path, text: str, *arguments: str) -> Result:
    path.write_text(text)
    return CliRunner().invoke(app, ["serve", "--config", str(path), *arguments])


def test_flags_go_before_the_file_and_the_file_before_defaults(started: list[MeshOptions], tmp_path: Path) -> None:
    text = (
        'engines = 3\nport = 9000\nmax-num-seqs = 7\nlog_level = "debug"\nstrict = true\n[engine]\nwatermark = 0.25\n'
    )
    result = run(tmp_path / "mesh.toml", text, "--port", "9001", "--no-enable-prefix-caching")
    assert result.exit_code == 0, result.output
    (options,) = started
    assert (options.engines, options.port, options.tokenizers) == (3, 9001, 1)
    assert "--strict" in options.flags["gateway"]
    assert {"--watermark=0.25", "--no-enable-prefix-caching", "--max-num-seqs=7"} <= set(options.flags["engine"])
    assert all("--log-level=debug" in options.flags[service] for service in SETTINGS)


def test_variables_go_before_the_file(
    started: list[MeshOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("TOKENLOOM_METRICS_LISTEN", "")  # which is decided for each part, as the file does
    monkeypatch.setenv("TOKENLOOM_PORT", "tcp://10.0.0.1:80")  # Kubernetes sets it for a Service of that name
    result = run(tmp_path / "mesh.toml", 'max_num_seqs = 7\n[engine]\nmetrics_listen = "127.0.0.1:0"')
    assert started[0].flags["engine"] == ("--metrics-listen=127.0.0.1:0", "--max-num-seqs=9")
    assert "Warning: TOKENLOOM_METRICS_LISTEN is not read" in result.stderr
    assert "TOKENLOOM_PORT" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_variable_that_no_option_has_is_told_the_nearest(
    command: str, started: list[MeshOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENLOOM_ENGINS", "2")
    monkeypatch.setenv("TOKENLOOM_MAX_NUM_SEQ", "9")
    monkeypatch.setenv("TOKENLOOM_PORT", "9000")
    monkeypatch.setenv("TOKENLOOM_XXXXXXXX", "secret")
    monkeypatch.setenv("TOKENLOOM_GATEWAY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TOKENLOOM_URL", "http://127.0.0.1:8000")
    result = CliRunner().invoke(app, [command, "--worker", "hash", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "Warning: TOKENLOOM_ENGINS is not read: no option has this name; did you mean --engines?",
        "Warning: TOKENLOOM_MAX_NUM_SEQ is not read: no option has this name; did you mean TOKENLOOM_MAX_NUM_SEQS?",
        "Warning: TOKENLOOM_PORT is not read: only --port sets this option",
        "Warning: TOKENLOOM_XXXXXXXX is not read: no option has this name",
    ]


def test_lists_that_are_given_twice_reach_the_parts_whole(started: list[MeshOptions]) -> None:
    lists = ("--allowed-hosts", "a", "--allowed-hosts=b,c", "--kv-transports", "shm", "--kv-transports", "socket")
    result = CliRunner().invoke(app, ["serve", "--worker", "hash", "--port", "0", *lists])
    assert result.exit_code == 0, result.output
    assert "--allowed-hosts=a,b,c" in started[0].flags["gateway"]
    assert "--kv-transports=shm,socket" in started[0].flags["engine"]


def test_options_may_stand_in_the_table_of_their_group(started: list[MeshOptions], tmp_path: Path) -> None:
    text = 'worker = "hash"\n[scheduler]\nmax_num_seqs = 7\n[engine]\nblock_size = 32\n[kv]\nkv_transports = ["shm"]'
    result = run(tmp_path / "mesh.toml", text)
    assert result.exit_code == 0, result.output
    flags = ("--worker=hash", "--block-size=32", "--max-num-seqs=7", "--kv-transports=shm")
    assert sorted(started[0].flags["engine"]) == sorted(flags)
    assert started[0].flags["tokenizer"] == ("--block-size=32",)


@pytest.mark.parametrize(
    ("arguments", "service", "flag"),
    [
        (("--num-gpu-blocks-override", "5"), "engine", "--num-kv-blocks=5"),
        (("--kv-cache-memory-bytes", "5"), "engine", "--kv-cache-memory=5"),
        (("--worker", "cpu"), "engine", "--worker=model"),
        (("--prefill-tokens-beside-decode", "none"), "engine", "--prefill-tokens-beside-decode=none"),
        (("--max-waiting", "5"), "engine", "--max-waiting=5"),
    ],
)
def test_former_spellings(started: list[MeshOptions], arguments: tuple[str, ...], service: str, flag: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert flag in started[0].flags[service]
    assert "coordinator" not in started[0].flags


def test_a_certificate_may_be_given_by_the_flags_of_others(started: list[MeshOptions], tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    files = {name: str(tmp_path / f"gateway.{end}") for name, end in (("cert", "crt"), ("key", "key"))}
    result = CliRunner().invoke(app, ["serve", "--tls-cert", files["cert"], "--tls-key", files["key"]])
    assert result.exit_code == 0, result.output
    assert {f"--public-tls-{name}={file}" for name, file in files.items()} <= set(started[0].flags["gateway"])


def test_keys_are_passed_in_the_environment(started: list[MeshOptions]) -> None:
    assert CliRunner().invoke(app, ["serve", "--api-key", "a,b"]).exit_code == 0
    assert started[0].environment == {"gateway": {"TOKENLOOM_API_KEY": "a,b"}}
    assert started[0].flags == {}


def test_every_option_of_an_engine_is_offered() -> None:
    left_out = {name for name in options_of(EngineSettings) if name not in OFFERS}
    assert left_out <= DECIDED | set(options_of(ServiceSettings))


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_other_forms_of_file(started: list[MeshOptions], tmp_path: Path, suffix: str) -> None:
    values = {"engines": 2, "tokenizer": {"metrics-listen": "127.0.0.1:0"}}
    result = run(tmp_path / f"mesh{suffix}", json.dumps(values))
    assert result.exit_code == 0, result.output
    assert [options.engines for options in started] == [2]
    assert started[0].flags["tokenizer"] == ("--metrics-listen=127.0.0.1:0",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine_count = 3", "no such option"),
        ("prot = 3", "did you mean port or fronts?"),
        ("engine = 3", "engine must be a table"),
        ("[engine]\nwatermrak = 0.1", "did you mean watermark?"),
        ("[scheduler]\nmax_num_seq = 3", "did you mean max_num_seqs"),
        ("[engine]\nrole = 'prefill'", "cannot be set"),
        ("config = 'a'", "no such option"),
        ("port = 'x'", "--port"),
        ("port", "cannot be parsed"),
    ],
)
def test_what_is_wrong_is_a_usage_error(started: list[MeshOptions], tmp_path: Path, text: str, message: str) -> None:
    result = run(tmp_path / "mesh.toml", text)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert started == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "nothing.toml")])
    assert result.exit_code == 2
    assert "cannot read" in result.output


def test_names_in_the_file_on_the_command_line_and_behind_the_model(started: list[MeshOptions], tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    for text, arguments, names in (
        ('served_model_name = "a"', (), ("a",)),
        ('served_model_name = ["a", "b"]', (), ("a", "b")),
        ('served_model_name = "a"', ("--served-model-name", "b", "--served-model-name", "c,b"), ("b", "c")),
        ("", (DEMO_MODEL_NAME, "--served-model-name", "a", "b", "c"), ("a", "b", "c")),
        ("", ("--served-model-name", "a", str(DEMO_MODEL)), ("a",)),
        ("", (), (DEMO_MODEL_NAME,)),
    ):
        result = run(file, text, *arguments)
        assert result.exit_code == 0, result.output
        assert (started[-1].served_model_name, *started[-1].other_names) == names
    for arguments, message in (
        ((DEMO_MODEL_NAME, "more"), "unexpected extra argument"),
        (("--served-model-name", "a,"), "a name is empty"),
        (("--served-model-name", "a", "b"), "'b' stands behind the names"),
        (("--served-model-name", "a", "b", "c"), "'b' stands behind the names"),
    ):
        result = run(file, "", *arguments)
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_further_models(started: list[MeshOptions], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, other)
    file = tmp_path / "mesh.toml"
    result = run(file, f'also = ["{other}", "third={DEMO_MODEL_NAME}"]')
    assert result.exit_code == 0, result.output
    assert [(model.name, model.path) for model in started[0].models[1:]] == [("other", other), ("third", DEMO_MODEL)]
    for arguments, message in (
        (("--also", DEMO_MODEL_NAME), "is given twice"),
        (("--also", f"x={other},x={other}"), "is given twice"),
        (("--also", f"={other}"), "must be MODEL or"),
        (("--also", "name="), "must be MODEL or"),
        (("--also", "./nothing"), "nothing does not exist"),
        (("--also", str(other), "--meshes", "meshes.toml"), "cannot be combined"),
    ):
        result = run(file, "", *arguments)
        written = " ".join(result.output.replace("│", " ").split())  # a narrow terminal breaks the line
        assert (result.exit_code in (1, 2), message in written) == (True, True), result.output
    assert len(started) == 1


def test_a_directory_of_batches_need_not_exist_and_belongs_to_one_gateway(
    started: list[MeshOptions], tmp_path: Path
) -> None:
    directory = str(tmp_path / "new")
    result = run(tmp_path / "mesh.toml", "", "--batch-dir", directory)
    assert result.exit_code == 0, result.output
    assert f"--batch-dir={directory}" in started[0].flags["gateway"]
    result = run(tmp_path / "mesh.toml", "", "--batch-dir", directory, "--gateways", "2")
    assert (result.exit_code, "belongs to one gateway" in result.output) == (2, True), result.output


def test_a_wrong_template_starts_nothing(started: list[MeshOptions], tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    for given, message in (("nowhere.jinja", "no such file"), ("{% if %}", "is not valid Jinja")):
        result = run(tmp_path / "mesh.toml", "", "--chat-template", given)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not started
    assert run(tmp_path / "mesh.toml", "", "--chat-template", str(template)).exit_code == 0
    for service in ("tokenizer", "engine"):
        assert f"--chat-template={template}" in started[0].flags[service]


def test_states_are_passed_between_engines(started: list[MeshOptions], tmp_path: Path) -> None:
    model = write_model("lfm2", tmp_path / "model", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, model)
    result = CliRunner().invoke(app, ["serve", str(model), "--prefill", "1", "--decode", "1"])
    assert result.exit_code == 0, result.output
    assert started[0].engine_roles == ["prefill", "decode"]


def test_models_are_checked_for_engines_over_which_experts_are_spread(started: list[MeshOptions]) -> None:
    spread = ("serve", "--data-parallel-size", "2", "--enable-expert-parallel")
    result = CliRunner().invoke(app, [*spread, "--prefill-context-parallel-size", "2"])
    assert (result.exit_code, started) == (2, [])
    assert "is not supported with enable_expert_parallel over engines" in result.output
    result = CliRunner().invoke(app, [*spread, "--enable-eplb"])
    assert "enable_eplb: the model has no experts" in result.output, "there are several engines to balance"


def test_graphs_of_towers_are_refused_where_there_are_none(
    started: list[MeshOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a process starts: the encoder learns it last, when the rest of the mesh serves."""
    images, sounds = str(write_whole_vision("llava", tmp_path)), str(write_whole_sound("whisper", tmp_path))
    with_graphs = ("--tower-graphs", "--port", "0")
    monkeypatch.setattr(prechecks, "may_have_gpu", lambda: False)
    result = CliRunner().invoke(app, ["serve", images, *with_graphs])
    assert (result.exit_code, started) == (2, [])
    assert "encoder: --tower-graphs: torch finds no GPU here" in result.output
    monkeypatch.setattr(prechecks, "may_have_gpu", lambda: True)
    result = CliRunner().invoke(app, ["serve", sounds, *with_graphs])
    assert (result.exit_code, started) == (2, [])
    assert f"{sounds} reads sounds" in result.output
    result = CliRunner().invoke(app, ["serve", images, *with_graphs, "--device", "cpu"])
    assert "encoder: --tower-graphs: graphs of a tower are those of a GPU" in result.output
    assert CliRunner().invoke(app, ["serve", images, *with_graphs]).exit_code == 0


def test_engines_of_prefill_and_decode_form_whole_groups(started: list[MeshOptions]) -> None:
    roles = ("serve", "--prefill", "2", "--decode", "4", "--data-parallel-size")
    assert CliRunner().invoke(app, [*roles, "2"]).exit_code == 0
    assert (started[0].engine_roles, started[0].ranks.size) == (["prefill"] * 2 + ["decode"] * 4, 2)
    result = CliRunner().invoke(app, [*roles, "3"])
    assert (result.exit_code, len(started)) == (2, 1)
    assert "must be multiples of 3" in result.output


def test_engines_that_would_publish_their_events_at_one_address_are_not_started(started: list[MeshOptions]) -> None:
    for endpoint, arguments, status in (
        ("tcp://127.0.0.1:5557", ("--engines", "2"), 2),
        ("tcp://127.0.0.1:0", ("--engines", "2"), 0),
        ("tcp://127.0.0.1:5557", ("--engines", "1"), 0),
        ("tcp://0.0.0.0:5557", ("--engines", "1"), 2),
    ):
        config = f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}'
        result = CliRunner().invoke(app, ["serve", "--kv-events-config", config, *arguments])
        assert result.exit_code == status, result.output
        assert ("--kv-events-config: endpoint" in result.output or "kv" in result.output) == (status == 2)
    assert len(started) == 2


def test_where_vllm_computes_its_models_are_not_ours_to_refuse(started: list[MeshOptions], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["NobodysForCausalLM"], "model_type": "no"}
    (path / "config.json").write_text(json.dumps(config))
    arguments = ["serve", str(path), "--port", "0"]
    assert "NobodysForCausalLM" in CliRunner().invoke(app, arguments).output
    remote = [*arguments, "--remote-vllm", "http://127.0.0.1:8100"]
    result = CliRunner().invoke(app, remote)
    assert result.exit_code == 0, result.output
    assert "--remote-vllm=http://127.0.0.1:8100" in started[0].flags["engine"]
    for more in (["--enable-lora"], ["--prefill", "1", "--decode", "1"], ["--data-parallel-size", "2"]):
        result = CliRunner().invoke(app, [*remote, *more])
        assert result.exit_code == 2, result.output
        assert "--remote-vllm: vLLM computes" in result.stderr
    assert len(started) == 1
    result = CliRunner().invoke(app, [*remote, "--engines", "2"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "has_gpu", "standby"),
    [
        ([], False, False),
        (["--standby"], False, True),
        (["--engines", "2"], False, True),
        (["--prefill", "1", "--decode", "1"], False, True),
        (["--engines", "2", "--no-standby"], False, False),
        (["--engines", "2", "--tensor-parallel-size", "2"], False, False),
        (["--engines", "2", "--worker", "hash"], False, False),
        (["--engines", "2"], True, False),
        (["--engines", "2", "--device", "cpu"], True, True),
    ],
)
def test_several_engines_that_import_torch_are_forks_of_a_standby(
    started: list[MeshOptions], arguments: list[str], has_gpu: bool, standby: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prechecks, "may_have_gpu", lambda: has_gpu)
    result = CliRunner().invoke(app, ["serve", DEMO_MODEL_NAME, "--port", "0", *arguments])
    assert result.exit_code == 0, result.output
    assert started[0].standby is standby


def test_a_standby_for_engines_on_gpus_is_refused(started: list[MeshOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prechecks, "may_have_gpu", lambda: True)
    result = CliRunner().invoke(app, ["serve", DEMO_MODEL_NAME, "--port", "0", "--standby"])
    assert result.exit_code == 2, result.output
    assert "--standby: engines on a GPU are no forks" in result.stderr
    assert not started


def test_options_that_move_requests_need_engines_that_exchange_kv(started: list[MeshOptions]) -> None:
    for option, words in (("--rebalance=2", "--rebalance: "), ("--move-before-preemption",) * 2):
        for roles, status in (((), 2), (("--kv-transports", "shm"), 0), (("--prefill", "1", "--decode", "1"), 0)):
            result = CliRunner().invoke(app, ["serve", "--worker", "hash", "--port", "0", option, *roles])
            assert result.exit_code == status, result.output
            assert (words in result.output and "--kv-transports" in result.output) == bool(status)
    assert CliRunner().invoke(app, ["serve", "--rebalance", "1.1", "--kv-transports", "shm"]).exit_code == 2
    assert len(started) == 4
