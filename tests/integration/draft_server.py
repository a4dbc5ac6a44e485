"""`vllm-ssd serve-draft` in a process of its own, for tests."""

import signal
import subprocess
import sys
import time
from pathlib import Path


class DraftServer:
    """A shared draft, up when the constructor returns."""

    def __init__(self, model: Path, address: str, core: int, *options: str) -> None:
        self._command = [sys.executable, "-m", "vllm_ssd.cli", "serve-draft", str(model)]
        self._command += ["--listen", address, "--device", f"cpu:{core}", *options]
        self._log_path = Path(address.partition("://")[2]).with_suffix(".log")
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        before = self.log().count("listens at")
        deadline = time.monotonic() + 120
        while self.log().count("listens at") == before:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        """All that it logged so far."""
        return self._log_path.read_text(errors="replace")

    def kill(self) -> None:
        """As an accident would."""
        self.process.kill()
        self.process.wait(30)

    def close(self) -> int:
        """As its user would; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)
