//! The order of the program's functions: a linker script that puts the functions of the start and of calls side by side.
//!
//! Without it, two thousand functions lie scattered among fifty thousand, and each page that one of them touches is read
//! and kept. `--write-order` makes the script from profiles of the real program, and each session checks that the script
//! still covers what runs.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use regex::Regex;
use std::os::unix::net::UnixStream;

use crate::profile::{FunctionCosts, read_costs};
use crate::threads::{ThreadClient, start_provider};

/// The script, which `docker/link.rs` gives to the linker.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docker/function_order.ld");

const PROGRAM: &str = env!("CARGO_BIN_EXE_cogni-gateway");

/// Profiles the program, and writes the script.
pub(crate) fn write_order() -> Result<()> {
    let functions = executed_functions()?;
    let mut known = HashSet::new();
    let patterns = functions.iter().map(|name| section_pattern(name));
    let mut script = String::from(HEAD);
    for pattern in patterns.filter(|pattern| known.insert(pattern.clone())) {
        writeln!(script, "    *(.text.{pattern} .text.hot.{pattern} .text.unlikely.{pattern})")?;
    }
    script.push_str(TAIL);
    fs::write(SCRIPT, script).context("writing the script")?;
    writeln!(io::stdout(), "{} patterns for {} functions", known.len(), functions.len())?;
    Ok(())
}

/// Profiles the program; returns whether the script covers too few of the functions that ran.
pub(crate) fn check_order() -> Result<bool> {
    let script = fs::read_to_string(SCRIPT).context("reading the script")?;
    let patterns: HashSet<_> = script
        .lines()
        .filter_map(|line| line.trim().strip_prefix("*(.text.")?.split(' ').next())
        .collect();
    let functions = executed_functions()?;
    let is_covered = |name: &&String| patterns.contains(&*section_pattern(name));
    let covered = functions.iter().filter(is_covered).count();
    let percent = covered * 100 / functions.len().max(1);
    let is_less = percent < MIN_COVERED_PERCENT;
    let note = if is_less { "; run this bench with `--write-order`" } else { "" };
    let all = functions.len();
    writeln!(io::stdout(), "the function order covers {covered} of {all} functions{note}")?;
    Ok(is_less)
}

/// Returns the program's functions that run: first those of calls, the most used first, and then those of the start.
fn executed_functions() -> Result<Vec<String>> {
    let start = profile_program("on", 0, 0)?;
    let mut ordered = vec![];
    let mut known = HashSet::new();
    let mut add = |mut functions: Vec<(String, u64)>| {
        functions.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        ordered.extend(
            functions.into_iter().map(|(name, _)| name).filter(|name| known.insert(name.clone())),
        );
    };
    let mut rest = HashMap::new();
    for (lane, calls, frames) in
        [("on", CALLS, 0), ("on", 1, FRAMES), ("off", CALLS, 0), ("off", 1, FRAMES)]
    {
        let costs = profile_program(lane, calls, frames)?;
        let times = u64::from(calls.max(frames));
        // A function of a call takes at least an instruction for each call beyond what the start takes.
        let is_of_calls = |(name, cost): &(&String, &u64)| {
            **cost >= start.get(*name).copied().unwrap_or_default() + times
        };
        add(costs.iter().filter(is_of_calls).map(|(name, cost)| (name.clone(), *cost)).collect());
        rest.extend(costs);
    }
    add(start.into_iter().collect());
    add(rest.into_iter().collect());
    Ok(ordered)
}

/// Returns the instructions of the program's own functions in a process that serves these calls.
fn profile_program(lane: &str, calls: u32, frames: u32) -> Result<HashMap<String, u64>> {
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name);
    let (provider, read) = start_provider();
    fs::write(path("gateway.toml"), format!("[server]\nlane = \"{lane}\"\n"))?;
    let mut program = Command::new("valgrind")
        .args(["--tool=callgrind", "--demangle=no"])
        .arg(format!("--callgrind-out-file={}", path("profile").display()))
        .args([PROGRAM, "proxy", "--config"])
        .arg(path("gateway.toml"))
        .env("SOCKET_PATH", path("llm.sock"))
        .env("LITELLM_HOST", provider.to_string())
        .env("LITELLM_MASTER_KEY", "sk-real")
        .env("BILLING_ACCOUNT_ID", "acct-1")
        .env("RUN_ID", "run-1")
        .env("ACCESS_LOG_PATH", path("access.log"))
        .env("AUDIT_LOG_PATH", path("audit.jsonl"))
        .env("METRICS_ADDR", "127.0.0.1:0")
        .env("MAX_TURNS", "1000000000")
        .env("MAX_TOTAL_TOKENS", "1000000000000000")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("running valgrind")?;
    while UnixStream::connect(path("llm.sock")).is_err() {
        ensure!(program.try_wait()?.is_none(), "the gateway has ended");
        thread::sleep(Duration::from_millis(20));
    }
    let mut client = ThreadClient::connect(&path("llm.sock"), read);
    (0..calls).for_each(|_| client.call(frames));
    drop(client);
    kill(Pid::from_raw(i32::try_from(program.id())?), Signal::SIGTERM)?;
    ensure!(program.wait()?.success(), "the gateway has failed");
    Ok(own_functions(read_costs(&path("profile"))?))
}

/// Selects the functions of Rust code in the program's own file. Functions of C libraries cannot be put in order.
fn own_functions(costs: FunctionCosts) -> HashMap<String, u64> {
    let mut own = HashMap::new();
    for ((object, function), cost) in costs {
        // callgrind marks the levels of a recursion: `name'2`.
        let name = function.split('\'').next().unwrap_or_default();
        if Path::new(&object) == Path::new(PROGRAM) && name.starts_with("_R") {
            *own.entry(name.to_owned()).or_default() += cost;
        }
    }
    own
}

/// Returns the pattern of a function's name in the name of its section. The compiler puts a function that it takes to run
/// often or seldom into a section of another name, `.text.hot.…` or `.text.unlikely.…`.
///
/// The name of a generic function has the names of its types, and names a crate by a hash that depends on the compiler
/// and the profile. The pattern leaves the hashes out. It also leaves out the positions of earlier parts of the name
/// (`B` and up to two digits), because the length of a hash moves them. The compiler appends `.llvm.` and a number to a
/// function that it has moved.
fn section_pattern(name: &str) -> String {
    static VARIABLE_PART: LazyLock<Regex> =
        LazyLock::new(|| Regex::new("(Cs)[0-9A-Za-z]+_|(B)[0-9A-Za-z]{1,2}_").unwrap());
    let plain = name.find(".llvm.").map_or(name, |end| &name[..end]);
    format!("{}*", VARIABLE_PART.replace_all(plain, "$1$2*_"))
}

const HEAD: &str = "/* The functions of the start and of calls, most used first. `docker/link.rs` gives this file to the linker.
   Made by: docker/cargo_dist bench --bench instructions -- --write-order */
SECTIONS {
  .text : {
";

const TAIL: &str = "  }
}
INSERT BEFORE .fini;
";

/// The calls of a profile.
const CALLS: u32 = 400;

/// The frames of a profile's stream.
const FRAMES: u32 = 400;

/// The share of the executed functions that the script must cover. Our choice: each function beyond it is a page.
const MIN_COVERED_PERCENT: usize = 90;
