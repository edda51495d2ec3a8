"""Writes the npm package ``tokenloom-client``: the public API for ``@grpc/grpc-js``, with types for TypeScript."""

import json
import shutil
import tomllib
from pathlib import Path

from .protoc import BUILD, PUBLIC, ROOT, StubsFailed, generate, run

FOLDER = BUILD / "npm"
NAME = "tokenloom-client"
_NEEDS = {"@bufbuild/protobuf": "^2.14.1", "@grpc/grpc-js": "^1.14.0"}
_TOOLS = {"@types/node": "20.19.43", "ts-proto": "2.18.0", "typescript": "5.9.3"}
_OPTIONS = (
    "outputServices=grpc-js",
    "env=node",
    "esModuleInterop=true",
    "useOptionals=messages",
    "forceLong=bigint",  # a seed has 64 bits, and a number of JavaScript 53
)
_COMPILER = {
    "target": "es2022",
    "module": "commonjs",  # node's `import` takes it too
    "declaration": True,
    "strict": True,
    "esModuleInterop": True,
    "skipLibCheck": True,
    "types": ["node"],
    "rootDir": "src",
    "outDir": "dist",
}


def write() -> Path:
    """Write, compile and pack the package, and return the archive that ``npm install`` takes. Raises `StubsFailed`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for made in ("src", "dist"):
        shutil.rmtree(FOLDER / made, ignore_errors=True)
    described = json.dumps(package(), indent=2)
    _install(described)
    (FOLDER / "tsconfig.json").write_text(json.dumps({"compilerOptions": _COMPILER, "include": ["src"]}, indent=2))
    programs = FOLDER / "node_modules" / ".bin"
    generate([("ts_proto", programs / "protoc-gen-ts_proto")], _OPTIONS, FOLDER / "src")
    run([str(programs / "tsc")], FOLDER)
    for old in BUILD.glob(f"{NAME}-*.tgz"):
        old.unlink()
    run(["npm", "pack", "--silent", "--pack-destination", str(BUILD)], FOLDER)
    (archive,) = BUILD.glob(f"{NAME}-*.tgz")
    return archive


def package() -> dict[str, object]:
    """Return what ``package.json`` holds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # A subpath for each proto, because both export names such as `protobufPackage`.
    parts = {Path(proto).stem: f"./dist/{Path(proto).with_suffix('')}" for proto in PUBLIC}
    return {
        "name": NAME,
        "version": project["version"],
        "description": "Stubs of Tokenloom's gRPC API, which serves large language models",
        "license": project["license"],
        "exports": {f"./{name}": {"types": f"{path}.d.ts", "default": f"{path}.js"} for name, path in parts.items()},
        "files": ["dist"],
        "dependencies": _NEEDS,
        "devDependencies": _TOOLS,
    }


def _install(described: str) -> None:
    """Install what the package needs and is made with, unless it is there as a whole."""
    folder = FOLDER / "node_modules"
    mark = folder / ".installed"
    if mark.is_file() and mark.read_text() == described:
        return
    if shutil.which("npm") is None:
        raise StubsFailed("the package is made with npm, which comes with Node.js and is not on PATH")
    shutil.rmtree(folder, ignore_errors=True)
    (FOLDER / "package.json").write_text(described)
    run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], FOLDER)
    mark.write_text(described)
