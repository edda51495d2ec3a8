"""A part without work of its own, to be supervised: the real lifecycle around an empty service.

``--behaviour``: ``serve``; ``usage`` and ``crash`` end before serving; ``deaf`` ignores SIGTERM;
``child`` leaves a process of its own behind, whose id it writes beside its state file; ``leave`` leaves its sockets to
its successor and drains until the file ``finish`` exists beside its state file.
"""

import asyncio
import signal
import subprocess
import sys
from typing import Annotated, ClassVar, Literal

from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import main
from tokenloom.services.runtime.host.service_settings import ServiceSettings


class FakeSettings(ServiceSettings, frozen=True, kw_only=True):
    service: ClassVar[str] = "fake"
    behaviour: Annotated[Literal["serve", "usage", "crash", "deaf", "child", "leave"], "What to do."] = "serve"


class FakeService:
    def __init__(self, settings: ServiceSettings) -> None:
        assert isinstance(settings, FakeSettings)
        self._settings = settings

    async def start(self, host: Host) -> None:
        behaviour = self._settings.behaviour
        self._host = host
        if behaviour in ("usage", "crash"):
            raise SystemExit(2 if behaviour == "usage" else 1)
        if behaviour == "deaf":
            # Not a mask of signals: this thread's would leave the signal to the threads of gRPC.
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if behaviour == "child":
            command = [sys.executable, "-c", "import signal; signal.pause()"]
            child = subprocess.Popen(command)  # noqa: ASYNC220 - it is to be left behind
            assert self._settings.state_file is not None
            self._settings.state_file.with_suffix(".child").write_text(str(child.pid))

    async def drain(self) -> None:
        if self._settings.behaviour == "leave":
            assert self._settings.state_file is not None
            self._host.publish(leaving=True)
            while not self._settings.state_file.with_name("finish").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        print("drained", flush=True)

    async def stop(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(main(FakeService, FakeSettings, "fake"))
