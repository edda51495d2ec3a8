"""The JDK's HttpClient, which Spring AI and LangChain4j use: compiles and runs ``JvmClient.java``."""

import subprocess
from pathlib import Path

subprocess.run(["java", str(Path(__file__).parent / "JvmClient.java")], check=True)
