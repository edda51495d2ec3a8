"""Which parts a mesh has and which flags they get."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.settings.mesh_spec import mesh_specs
from tokenloom.supervisor.layout import (
    MESHES,
    CoreShare,
    LocalRanks,
    MeshOptions,
    ServedModel,
    divide_cores,
    parts_of,
    relay_ports,
    siblings,
    write_meshes,
)
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import GatewayPorts, PortTaken

DIRECTORY = Path("/run/mesh")
PORTS = [GatewayPorts(8000, 9000), GatewayPorts(8001, 9001)]


def options(**values: object) -> MeshOptions:
    return MeshOptions(**{"model": Path("/models/demo"), "served_model_name": "demo", **values})  # type: ignore[arg-type]


def flag(part: PartSpec, name: str) -> str:
    return part.command[part.command.index(name) + 1]


def test_one_of_each_in_the_order_in_which_they_drain() -> None:
    parts = parts_of(options(), DIRECTORY, PORTS)
    assert [part.service for part in parts] == ["gateway", "output_processor", "engine", "tokenizer", "coordinator"]
    assert [part.role for part in parts] == [None, None, "both", None, None]


def test_models_that_read_images_have_encoders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text("{}")

    def encoders(**values: object) -> list[PartSpec]:
        parts = parts_of(options(model=tmp_path, **values), DIRECTORY, PORTS)
        return [part for part in parts if part.service == "encoder"]

    (one,) = encoders()
    assert flag(one, "--coordinator") == "unix:/run/mesh/coordinator-0.sock"
    assert [part.name for part in encoders(encoders=2)] == ["encoder-0", "encoder-1"]
    assert not encoders(encoders=0)
    assert not encoders(flags={"engine": ("--language-model-only",)})
    text = ServedModel(Path("/models/demo"), "text")
    also = encoders(more_models=(text, ServedModel(tmp_path, "third")), encoders=2)
    assert [(part.index, part.model) for part in also] == [(0, "demo"), (1, "demo"), (2, "third"), (3, "third")]
    assert flag(also[2], "--coordinator") == "unix:/run/mesh/coordinator-2.sock"


@pytest.mark.parametrize("kind", ["whisper", "qwen2_audio"])
def test_models_that_read_sounds_have_encoders(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert "encoder" not in [part.service for part in parts_of(options(model=tmp_path), DIRECTORY, PORTS)]
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert "encoder" in [part.service for part in parts_of(options(model=tmp_path), DIRECTORY, PORTS)]


def test_internal_parts_listen_on_sockets_of_the_private_directory() -> None:
    for part in parts_of(options(), DIRECTORY, PORTS)[1:]:
        assert flag(part, "--listen") == f"unix:/run/mesh/{part.name}.sock"
        assert part.leftovers[:2] == (DIRECTORY / f"{part.name}.sock", DIRECTORY / f"{part.name}.sock.calls")


def test_the_first_coordinator_waits_for_no_engine_to_come_back() -> None:
    part = parts_of(options(), DIRECTORY, PORTS)[-1]
    assert flag(part.first, "--settle-seconds") == "0"
    assert "--settle-seconds" not in part.command
    standby = parts_of(options(coordinators=2), DIRECTORY, PORTS)[-1]
    assert standby.first.command == standby.command, "it takes the place of another one"


def test_coordinators_compete_for_a_lock_and_one_address() -> None:
    active, standby = parts_of(options(coordinators=2), DIRECTORY, PORTS)[-2:]
    assert [part.name for part in (active, standby)] == ["coordinator-0", "coordinator-1"]
    for name in ("--listen", "--lease"):
        assert flag(active, name) == flag(standby, name)
    assert flag(active, "--listen") == "unix:/run/mesh/coordinator-0.sock"
    for part in (active, standby):  # one that starts again must not remove the socket of the other
        health = DIRECTORY / f"{part.name}-health.sock"
        assert (flag(part, "--health-listen"), part.leftovers) == (f"unix:{health}", (health,))


def test_the_gateway_knows_every_replica() -> None:
    gateway = parts_of(options(tokenizers=2, output_processors=2), DIRECTORY, PORTS)[0]
    assert flag(gateway, "--tokenizers") == "unix:/run/mesh/tokenizer-0.sock,unix:/run/mesh/tokenizer-1.sock"
    assert flag(gateway, "--output-processors").count(",") == 1
    assert flag(gateway, "--coordinator") == "unix:/run/mesh/coordinator-0.sock"


def test_gateways_listen_on_their_ports() -> None:
    gateways = [part for part in parts_of(options(gateways=2, host="::1"), DIRECTORY, PORTS) if "gateway" in part.name]
    assert [flag(part, "--http-listen") for part in gateways] == ["[::1]:8000", "[::1]:8001"]
    assert [flag(part, "--listen") for part in gateways] == ["[::1]:9000", "[::1]:9001"]


def test_the_gateways_share_a_secret_that_no_other_part_has() -> None:
    name = "TOKENLOOM_CACHE_SALT_SECRET"
    parts = parts_of(options(gateways=2), DIRECTORY, PORTS)
    first, second = (part.environment[name] for part in parts if part.service == "gateway")
    assert first == second
    assert len(first) >= 32
    assert not any(name in part.environment for part in parts if part.service != "gateway")
    assert parts_of(options(), DIRECTORY, PORTS)[0].environment[name] != first
    chosen = options(environment={"gateway": {name: "the user's secret"}})
    assert parts_of(chosen, DIRECTORY, PORTS)[0].environment[name] == "the user's secret"


def test_flags_and_environment_reach_their_service_only() -> None:
    parts = parts_of(
        options(
            flags={"engine": ("--dtype", "float32")},
            environment={"gateway": {"TOKENLOOM_API_KEY": "secret"}},
            common_flags=("--log-level", "debug"),
        ),
        DIRECTORY,
        PORTS,
    )
    assert [part.service for part in parts if "--dtype" in part.command] == ["engine"]
    assert [part.service for part in parts if "TOKENLOOM_API_KEY" in part.environment] == ["gateway"]
    assert all("TOKENLOOM_API_KEY" in part.withheld for part in parts)
    assert not any("secret" in argument for part in parts for argument in part.command)
    assert all(flag(part, "--log-level") == "debug" for part in parts)


def test_prefill_and_decode_engines_are_told_their_roles() -> None:
    engines = [part for part in parts_of(options(prefill=1, decode=2), DIRECTORY, PORTS) if part.service == "engine"]
    assert [part.name for part in engines] == ["engine-0", "engine-1", "engine-2"]
    assert [part.role for part in engines] == ["prefill", "decode", "decode"]
    assert [flag(part, "--role") for part in engines] == ["prefill", "decode", "decode"]
    assert [flag(part, "--engines-on-host") for part in engines] == ["3", "3", "3"]


def test_engines_serve_kv_on_sockets_of_their_own() -> None:
    for part in parts_of(options(prefill=1, decode=1), DIRECTORY, PORTS):
        if part.service == "engine":
            assert flag(part, "--kv-listen") == f"unix:/run/mesh/{part.name}-kv.sock"
            assert DIRECTORY / f"{part.name}-kv.sock" in part.leftovers


def test_engines_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    engines = [part for part in parts_of(options(engines=2), DIRECTORY, PORTS) if part.service == "engine"]
    assert [flag(part, "--cpus") for part in engines] == ["0,1", "2,3"]
    assert [flag(part, "--role") for part in engines] == ["both", "both"]
    assert not any("--kv-listen" in part.command for part in engines)
    assert [flag(part, "--num-threads") for part in engines] == ["2", "2"]
    assert [flag(part, "--engines-on-host") for part in engines] == ["2", "2"]
    assert [flag(part, "--place-on-host") for part in engines] == ["0", "1"], "each has a GPU of its own"


def test_only_the_gateway_knows_the_further_names() -> None:
    parts = parts_of(options(other_names=("b", "c")), DIRECTORY, PORTS)
    names = {part.service: flag(part, "--served-model-name") for part in parts if part.service != "coordinator"}
    assert names.pop("gateway") == "demo,b,c"
    assert set(names.values()) == {"demo"}


FIRST = {"served_model_name": "demo", "tokenizers": "unix:/t", "output_processors": "unix:/o", "coordinator": "unix:/c"}
MORE = (ServedModel(Path("/models/small"), "small"), ServedModel(Path("/models/tiny"), "tiny"))


def test_each_model_has_parts_of_its_own_behind_the_same_gateways() -> None:
    parts = parts_of(options(more_models=MORE, prefill=1, decode=1, tokenizers=2), DIRECTORY, PORTS)
    names = [part.name for part in parts]
    assert [name for name in names if "engine" in name] == [f"engine-{index}" for index in range(6)]
    assert (names.count("gateway-0"), len(set(names))) == (1, len(names))
    models = {"": "", "demo": "/models/demo", "small": "/models/small", "tiny": "/models/tiny"}
    for part in parts:
        assert "--model" not in part.command or flag(part, "--model") == models[part.model]
        if part.service in ("engine", "output_processor"):
            number = list(models).index(part.model) - 1
            assert flag(part, "--coordinator") == f"unix:/run/mesh/coordinator-{number}.sock"
    engines = [part for part in parts if part.service == "engine"]
    assert [part.model for part in engines] == ["demo", "demo", "small", "small", "tiny", "tiny"]
    assert [part.role for part in engines] == ["prefill", "decode"] * 3
    assert {flag(part, "--engines-on-host") for part in engines} == {"6"}
    tokenizers = [part.model for part in parts if part.service == "tokenizer"]
    assert tokenizers == ["demo", "demo", "small", "small", "tiny", "tiny"]


def test_the_gateways_learn_of_further_models_from_a_file(tmp_path: Path) -> None:
    chosen = options(more_models=MORE, tokenizers=2, coordinators=2)
    gateway = parts_of(chosen, tmp_path, PORTS)[0]
    assert flag(gateway, "--tokenizers") == f"unix:{tmp_path}/tokenizer-0.sock,unix:{tmp_path}/tokenizer-1.sock"
    assert flag(gateway, "--meshes") == str(tmp_path / MESHES)
    write_meshes(chosen, tmp_path)
    tables = json.decode((tmp_path / MESHES).read_bytes())["mesh"]
    assert [table["served_model_name"] for table in tables] == [["small"], ["tiny"]]
    assert tables[1]["tokenizers"] == [f"unix:{tmp_path}/tokenizer-{index}.sock" for index in (4, 5)]
    assert tables[1]["output_processors"] == [f"unix:{tmp_path}/output_processor-2.sock"]
    assert tables[1]["coordinator"] == f"unix:{tmp_path}/coordinator-4.sock"
    specs = mesh_specs(GatewaySettings.of(**FIRST, meshes=tmp_path / MESHES))
    assert [spec.names for spec in specs] == [("demo",), ("small",), ("tiny",)]


def test_one_model_needs_no_file(tmp_path: Path) -> None:
    write_meshes(options(), tmp_path)
    assert not list(tmp_path.iterdir())
    assert not any("--meshes" in part.command for part in parts_of(options(), tmp_path, PORTS))


def test_the_engines_of_a_data_parallel_group_have_ranks() -> None:
    engines = [part for part in parts_of(options(data_parallel_size=3), DIRECTORY, PORTS) if part.service == "engine"]
    assert [flag(part, "--data-parallel-rank") for part in engines] == ["0", "1", "2"]
    assert {flag(part, "--data-parallel-address") for part in engines} == {"unix:/run/mesh/data-parallel-0.sock"}
    (engine,) = (
        part
        for part in parts_of(
            options(data_parallel_size=3, data_parallel_start_rank=2, data_parallel_external_lb=True), DIRECTORY, PORTS
        )
        if part.service == "engine"
    )
    assert flag(engine, "--data-parallel-rank") == "2"


def test_engines_of_each_role_form_groups_of_their_own() -> None:
    chosen = options(prefill=2, decode=4, data_parallel_size=2)
    chosen.ranks.check_roles(chosen.prefill, chosen.decode)
    engines = [part for part in parts_of(chosen, DIRECTORY, PORTS) if part.service == "engine"]
    assert [part.role for part in engines] == ["prefill"] * 2 + ["decode"] * 4
    assert [flag(part, "--data-parallel-rank") for part in engines] == ["0", "1"] * 3
    groups = [name for name in ("prefill-0", "decode-0", "decode-1") for _ in range(2)]
    assert [flag(part, "--data-parallel-group") for part in engines] == groups
    addresses = [flag(part, "--data-parallel-address") for part in engines]
    assert addresses == [f"unix:/run/mesh/{name}-0.sock" for name in groups]


@pytest.mark.parametrize(
    ("ranks", "counts", "error"),
    [
        (LocalRanks(2, None, 0, is_split=False), (2, 3), "--prefill 2 and --decode 3 must be multiples of 2"),
        (LocalRanks(2, None, 0, is_split=False), (1, 2), "--prefill 1 and --decode 2 must be multiples of 2"),
        (LocalRanks(2, 1, 0, is_split=True), (2, 2), "all engines of a group run here"),
        (LocalRanks(2, None, 0, is_split=False, address="10.0.0.1:7000"), (2, 2), "all engines of a group run here"),
    ],
)
def test_roles_that_form_no_whole_groups_are_refused(ranks: LocalRanks, counts: tuple[int, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ranks.check_roles(*counts)


SOCKET = Path("/run/mesh/group.sock")
GROUP = ("--data-parallel-group", "data-parallel", "--data-parallel-size", "4")


def test_without_a_group_engines_get_no_flags() -> None:
    ranks = LocalRanks(None, None, 0, is_split=False)
    ranks.check()
    assert (ranks.count, ranks.flags(0, SOCKET)) == (0, ())


def test_all_ranks_of_a_group_here_meet_at_a_socket() -> None:
    ranks = LocalRanks(4, None, 0, is_split=False)
    ranks.check()
    assert ranks.count == 4
    assert ranks.flags(3, SOCKET) == (
        *GROUP, "--data-parallel-rank", "3", "--data-parallel-address", "unix:/run/mesh/group.sock",
    )  # fmt: skip


def test_ranks_behind_a_balancer_have_no_address_for_waves() -> None:
    ranks = LocalRanks(4, 2, 2, is_split=True)
    ranks.check()
    assert ranks.flags(1, SOCKET) == (*GROUP, "--data-parallel-rank", "3")


def test_ranks_of_several_machines_meet_where_the_option_says() -> None:
    ranks = LocalRanks(4, 2, 2, is_split=True, address="10.77.0.1:7000")
    ranks.check()
    assert ranks.flags(0, SOCKET)[-2:] == ("--data-parallel-address", "10.77.0.1:7000")


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        (LocalRanks(None, 2, 0, is_split=False), "need --data-parallel-size"),
        (LocalRanks(4, 2, 0, is_split=False), "--data-parallel-size-local 2 is less than --data-parallel-size 4"),
        (LocalRanks(4, 2, 3, is_split=True), "--data-parallel-start-rank 3 and 2 engines here exceed"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(ranks: LocalRanks, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ranks.check()


def test_one_engine_has_a_small_machine() -> None:
    assert divide_cores(1, [0, 1, 2], str) == [CoreShare((), 3)]


def test_more_engines_than_cores_are_not_bound() -> None:
    assert divide_cores(3, [0, 1], str) == [CoreShare((), 1)] * 3


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (2, [CoreShare((0,), 1), CoreShare((1,), 1)]),
        (4, [CoreShare((0, 1), 2), CoreShare((2, 3), 2)]),
        (16, [CoreShare(tuple(range(2, 9)), 7), CoreShare(tuple(range(9, 16)), 7)]),
    ],
)
def test_a_prefill_and_a_decode_engine(cores: int, expected: list[CoreShare]) -> None:
    assert divide_cores(2, list(range(cores)), str) == expected


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (4, 4), (7, 7), (8, 7), (16, 14), (64, 56)])
def test_from_eight_cores_on_one_of_eight_is_left_to_the_services(cores: int, threads: int) -> None:
    assert divide_cores(1, list(range(cores)), str) == [CoreShare((), threads)]


def test_engines_that_need_every_core_get_it() -> None:
    assert divide_cores(8, list(range(8)), str) == [CoreShare((cpu,), 1) for cpu in range(8)]


def test_engines_do_not_share_the_hardware_threads_of_a_core() -> None:
    """Cores with two threads, whose second ones have the numbers from 4 on."""
    assert divide_cores(2, list(range(8)), lambda cpu: f"{cpu % 4},{cpu % 4 + 4}") == [
        CoreShare((0, 4, 1, 5), 4),
        CoreShare((2, 6, 3, 7), 4),
    ]


@given(st.integers(2, 16), st.sets(st.integers(0, 200), min_size=19, max_size=64))
def test_cores_are_shared_out_evenly(engines: int, cores: set[int]) -> None:
    shares = divide_cores(engines, sorted(cores), str)
    assert sorted(cpu for share in shares for cpu in share.cpus) == sorted(cores)[len(cores) // 8 :]
    sizes = [len(share.cpus) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [share.threads for share in shares]


def test_the_system_names_the_threads_of_a_core(tmp_path: Path) -> None:
    directory = tmp_path / "cpu1/topology"
    directory.mkdir(parents=True)
    (directory / "thread_siblings_list").write_text("1,17\n")
    assert siblings(1, tmp_path) == "1,17"
    assert siblings(2, tmp_path) == "2"


def test_relays_pass_calls_to_every_gateway_and_drain_first() -> None:
    relays = [GatewayPorts(0, 9443, None, 7), GatewayPorts(0, 9444, None, 8)]
    parts = parts_of(options(gateways=2, relays=2, host="10.0.0.1"), DIRECTORY, PORTS, relays)
    assert [part.name for part in parts][:4] == ["relay-0", "relay-1", "gateway-0", "gateway-1"]
    relay, gateway = parts[1], parts[2]
    assert flag(relay, "--grpc-listen") == "10.0.0.1:9444"
    assert flag(relay, "--grpc-gateways") == "10.0.0.1:9000,10.0.0.1:9001"
    assert (flag(relay, "--grpc-listen-fd"), relay.descriptors) == ("8", (8,))
    assert "--https-listen" not in relay.command
    assert flag(gateway, "--http-listen") == "10.0.0.1:8000"  # clients of HTTP in plain text need no relay
    assert "--hold-connections" not in gateway.command


def test_gateways_are_on_loopback_behind_relays_with_a_certificate() -> None:
    flags = {"relay": ("--public-tls-cert=a.crt", "--public-tls-key=a.key")}
    relays = [GatewayPorts(8443, 9443, 6, 7)]
    asked = options(gateways=2, relays=1, host="0.0.0.0", flags=flags)
    relay, gateway, *_ = parts_of(asked, DIRECTORY, PORTS, relays)
    assert flag(relay, "--https-listen") == "0.0.0.0:8443"
    assert flag(relay, "--http-gateways") == "127.0.0.1:8000,127.0.0.1:8001"
    assert relay.descriptors == (7, 6)
    assert flag(gateway, "--http-listen") == "127.0.0.1:8000"
    assert gateway.command[3:][gateway.command[3:].index("--listen") + 1] == "127.0.0.1:9000"
    assert flag(gateway, "--hold-connections") == "/run/mesh/held"


def test_relays_hold_their_ports() -> None:
    flags = {"relay": ("--public-tls-cert=a.crt",)}
    with relay_ports(options(relays=2, relay_port=0, flags=flags)) as ports:
        assert len({port for each in ports for port in (each.http, each.grpc)}) == 4
        assert all(each.http_descriptor and each.grpc_descriptor for each in ports)
        taken = ports[0].http
        with pytest.raises(PortTaken), relay_ports(options(relays=1, relay_port=taken, flags=flags), is_check=True):
            pass
    with relay_ports(options(relays=1, relay_port=0)) as [only_grpc]:
        assert (only_grpc.http, only_grpc.http_descriptor) == (0, None)
