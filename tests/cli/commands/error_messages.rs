//! R8: Tests of every message that a person can get at the shell: it names the thing, says why, and says what to do
//! instead.
//!
//! The snapshots hold all messages, for review. The tests check what no message may contain.

use std::fmt::Write;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;

use super::run_cogni;

/// A command line; `DIR` stands for a directory of the test.
type CommandRow = &'static str;

/// Command lines with wrong or missing settings.
const SETTINGS: &[CommandRow] = &[
    "proxy",
    "proxy --run-id r",
    "proxy --run-id r --billing-account-id a --max-turns x",
    "proxy --run-id r --billing-account-id a --max-cost-usd many",
    "proxy --run-id r --billing-account-id a --litellm-host http://x/y",
    "proxy --run-id r --billing-account-id a --socket-mode rw",
    "proxy --run-id r --billing-account-id a --run-deadline-seconds soon",
    "proxy --run-id r --billing-account-id a --metrics-addr here",
    "proxy --run-id r --billing-account-id a --capabilities fly",
    "proxy --run-id r --billing-account-id a --unknown-fields maybe",
    "proxy --run-id r --billing-account-id a --litellm-metadata-json x",
    "proxy --run-id r --billing-account-id a --litellm-master-key-file DIR/none",
    "proxy --config DIR/none",
    "proxy --config DIR/wrong-field.toml",
    "proxy --config DIR/wrong-type.toml",
    "proxy --max-turn 5",
    "shared",
    "check --config DIR/none",
    "explain DIR/none",
];

/// Command lines of runs that cannot begin.
const RUNS: &[CommandRow] = &[
    "run",
    "run --billing-account-id a",
    "run --billing-account-id a --driver podman -- true",
    "run --billing-account-id a --max-turns -1 -- true",
    "run --billing-account-id a --env X -- true",
    "run --billing-account-id a --max-memory lots -- true",
    "run --billing-account-id a --max-runtime soon -- true",
    "run --billing-account-id a --cpus x -- true",
    "run --billing-account-id a --pids x -- true",
    "run --billing-account-id a --uids 0 -- true",
    "run --billing-account-id a --uid root -- true",
    "run --billing-account-id a --uid 5 --uids 5-6 -- true",
    "run --billing-account-id a --workspace DIR/none -- true",
    "run --billing-account-id a --root DIR --workspace DIR/file/x -- true",
    "run --billing-account-id a --rootfs DIR/none -- true",
    "run --billing-account-id a --init DIR/none -- true",
    "run --billing-account-id a --spec DIR/none",
    "run --billing-account-id a --spec DIR/wrong-field.toml",
    "run --billing-account-id a --agent nope --message x",
    "run --billing-account-id a --agent sandbox:agent --message x",
    "run --billing-account-id a --agent sandbox:agent --model m",
    "run --billing-account-id a --message x -- true",
    "run --billing-account-id a --agents-dir DIR/none --agent x --message x",
    "run --billing-account-id a --image nope:1 --driver embedded -- true",
    "run --billing-account-id a --run-dir DIR/long -- true",
    "run --billing-account-id a --run-dir DIR/open -- true",
    "run --billing-account-id a --state-dir DIR/open -- true",
    "run --billing-account-id a --repo foo --branch-key k -- true",
    "run --billing-account-id a --repo https://github.com/acme/site -- true",
    "run --billing-account-id a --repo https://github.com/acme/site --branch-key a/b -- true",
    "run --billing-account-id a --repo https://github.com/acme/site --branch-key k --pull-request -- true",
    "run --billing-account-id a --repo file:///nope.git --branch-key k --pull-request -- true",
    "run --billing-account-id a --pull-request -- true",
];

/// Command lines of an operator.
const OPERATORS: &[CommandRow] = &[
    "grant mint",
    "grant mint --name x",
    "grant mint --name x --allow-sandbox",
    "grant mint --name x --allow-sandbox --agent *",
    "grant mint --name x --allow-sandbox --agent nope --account a",
    "grant mint --name x --allow-sandbox --agent sandbox:agnet* --account a",
    "grant mint --name x --allow-sandbox --agent * --account a --repo acme/site",
    "grant mint --name x --allow-sandbox --agent * --account a --repo https://github.com/acme",
    "grant mint --name x --allow-sandbox --agent * --account a --repo git@github.com:acme/site.git",
    "grant mint --name x --allow-sandbox --agent * --account a --repo https://github.com/acme*",
    "grant mint --name x --access all",
    "grant mint --name x --max-turns x",
    "grant mint --name x --max-cost-usd much",
    "grant mint --name x --allow-sandbox --agent * --account a --ttl 100y",
    "grant mint --name x --allow-sandbox --agent * --account a --state-dir DIR/open",
    "grant list --state-dir DIR/none",
    "grant show g --state-dir DIR/none",
    "grant revoke g --state-dir DIR/none",
    "relay status --state-dir DIR/none",
    "relay retry",
    "relay retry x --state-dir DIR/open",
    "relay retry x --relay-committer me --state-dir DIR/own",
    "billing status --state-dir DIR/none",
    "billing receipts --state-dir DIR/none",
    "billing receipts r --state-dir DIR/none",
    "billing days --since yesterday --state-dir DIR/none",
    "billing reconcile --litellm-host http://x/y",
    "admin runs",
    "admin --socket DIR/none.sock runs",
    "admin --socket DIR/none.sock budget r max_turns",
    "audit verify DIR/none",
    "audit show DIR",
    "token mint",
    "token mint --run-id r --ttl 1h --keys-file DIR/none",
    "sweep --run-dir DIR/none",
    "forget --apply --state-dir DIR/none",
    "forget x --state-dir DIR/none",
    "health --socket-path DIR/none.sock",
    "serve --listen foo",
    "serve --config DIR/none",
    "serve --config DIR/wrong-field.toml",
    "serve --listen 127.0.0.1:0 --state-dir DIR/open --run-dir DIR/own",
    "serve --listen 127.0.0.1:0 --state-dir DIR/own --run-dir DIR/open",
    "serve --listen 127.0.0.1:0 --state-dir DIR/own --run-dir DIR/long",
    "provider --listen x",
    "provider --script what",
    "agents --agents-dir DIR/none",
    "cogni-init",
    "completions",
    "completions tcsh",
    "man",
    "man DIR/file/x",
    "rum",
];

#[test]
fn errors_of_settings_list_the_allowed_values() {
    insta::assert_snapshot!(run_command_lines(SETTINGS));
}

#[test]
fn a_run_that_cannot_begin_says_what_is_missing() {
    insta::assert_snapshot!(run_command_lines(RUNS));
}

#[test]
fn errors_of_operator_commands_say_what_to_do() {
    insta::assert_snapshot!(run_command_lines(OPERATORS));
}

/// R1: If something that a run needs is missing, the result has a code of its own.
#[test]
fn a_run_without_its_engine_could_not_begin() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_str().unwrap();
    let (socket, run_dir) = (format!("{directory}/none.sock"), format!("{directory}/r"));
    let flags =
        ["run", "--billing-account-id", "a", "--image", "nope:1", "--docker-socket", &socket];
    let arguments = [&flags[..], &["--run-dir", &run_dir, "--", "true"]].concat();
    let variables =
        [("LITELLM_MASTER_KEY", "sk-x"), ("LOG", "off"), ("COGNI_STATE_DIR", directory)];
    let (code, result, _) = run_cogni(&arguments, &variables);
    let result: Value = serde_json::from_str(&result).unwrap();
    assert_eq!((code, &result["error_code"]), (2, &"engine_unreachable".into()), "{result}");
    let said = result["error"].as_str().unwrap().replace(directory, "DIR");
    insta::assert_snapshot!(said, @"container engine at `DIR/none.sock` does not answer: Socket not found: DIR/none.sock; start it, name its socket with `--docker-socket`, or leave the image out for the driver `embedded`, which needs no engine");
}

/// R8: Shell completions know every command, and each command has a manual page.
#[test]
fn shells_and_man_know_every_command() {
    let place = tempfile::tempdir().unwrap();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let (code, script, said) = run_cogni(&["completions", shell], &[]);
        assert_eq!((code, said.as_str()), (0, ""));
        assert!(script.contains("reconcile") && script.contains("max-cost-usd"), "{shell}");
    }
    let directory = place.path().join("man1");
    let (code, _, said) = run_cogni(&["man", directory.to_str().unwrap()], &[]);
    assert_eq!((code, said.as_str()), (0, ""));
    for name in ["cogni-gateway", "cogni-gateway-run", "cogni-gateway-grant-mint"] {
        let page = fs::read_to_string(directory.join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{name}: {page}");
    }
}

/// Runs each command line; returns its exit status and output. No command line starts a run.
fn run_command_lines(rows: &[CommandRow]) -> String {
    let place = tempfile::tempdir().unwrap();
    prepare_files(place.path());
    let directory = place.path().to_str().unwrap();
    // The kernel's limit is in bytes, and the length of the directory's name varies.
    let long = format!("{directory}/{}", "long".repeat((90 - directory.len()) / 4));
    let mut told = String::new();
    for row in rows {
        let words = row.replace("DIR/long", &long).replace("DIR", directory);
        let arguments: Vec<_> = words.split(' ').collect();
        let variables = [("LITELLM_MASTER_KEY", "sk-x"), ("PATH", "/usr/bin:/bin")];
        let (code, _, said) = run_cogni(&arguments, &variables);
        assert_ne!(code, 0, "{row}: {said}");
        check_message(row, &said);
        let said = said.replace(&long, "DIR/long").replace(directory, "DIR");
        writeln!(told, "$ cogni-gateway {row}\n{code}: {said}").unwrap();
    }
    let filters = [
        (r"\d+ bytes too long", "[n] bytes too long"),
        (r"paths of \d+ bytes", "paths of [n] bytes"),
        (r"cogni-init-[0-9a-f]+", "cogni-init-[digest]"),
    ];
    filters.iter().fold(told, |told, (found, shown)| {
        regex::Regex::new(found).unwrap().replace_all(&told, *shown).into_owned()
    })
}

/// Asserts that no message has the text of a library, of another program's interface, or of a panic.
fn check_message(row: &str, said: &str) {
    let foreign = [
        "expected u",
        "expected i",
        "expected struct",
        "expected a ",
        "invalid type",
        "invalid digit",
        "invalid float",
        "elements",
        "literal",
        "panicked",
        "RUST_BACKTRACE",
        "error: error",
        "Error {",
        "GET /",
        "POST /",
    ];
    for words in foreign {
        assert!(!said.contains(words), "`{row}` says `{words}`: {said}");
    }
    assert!(said.starts_with("error: ") || said.contains("\nerror: "), "`{row}`: {said}");
}

fn prepare_files(place: &Path) {
    fs::write(place.join("file"), "").unwrap();
    fs::write(place.join("wrong-field.toml"), "max_turnz = 5\n").unwrap();
    fs::write(place.join("wrong-type.toml"), "[budget]\nmax_turns = \"many\"\n").unwrap();
    for (name, mode) in [("open", 0o777), ("own", 0o700)] {
        fs::create_dir(place.join(name)).unwrap();
        fs::set_permissions(place.join(name), Permissions::from_mode(mode)).unwrap();
    }
}
