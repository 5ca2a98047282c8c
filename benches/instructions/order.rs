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
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::net::UnixStream;

use crate::profile::{FunctionCosts, read_costs};
use crate::threads::{ThreadClient, start_provider};

/// The script, which `docker/link.rs` gives to the linker.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docker/function_order.ld");

const PROGRAM: &str = env!("CARGO_BIN_EXE_cogni-gateway");

/// Profiles the program, and writes the script.
pub(crate) fn write_order() -> Result<()> {
    let functions = executed_functions()?;
    let sizes = symbol_sizes()?;
    let patterns = symbol_patterns(&functions, &sizes);
    let mut script = String::from(HEAD);
    for pattern in &patterns {
        writeln!(script, "    *(.text.{pattern})")?;
    }
    script.push_str(TAIL);
    fs::write(SCRIPT, script).context("writing the script")?;
    writeln!(io::stdout(), "{} patterns for {} functions", patterns.len(), functions.len())?;
    Ok(())
}

/// Profiles the program; returns whether the script covers too few of the functions that ran.
pub(crate) fn check_order() -> Result<bool> {
    let script = fs::read_to_string(SCRIPT).context("reading the script")?;
    let patterns: HashSet<_> = script
        .lines()
        .filter_map(|line| line.trim().strip_prefix("*(.text.")?.strip_suffix("*)"))
        .collect();
    let functions = executed_functions()?;
    let is_covered = |function: &&String| {
        patterns.contains(any_instance(function)) || patterns.contains(one_instance(function))
    };
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
        if Path::new(&object) == Path::new(PROGRAM)
            && (name.starts_with("_ZN") || name.starts_with("_R"))
        {
            *own.entry(name.to_owned()).or_default() += cost;
        }
    }
    own
}

/// Returns the sizes of the program's functions in bytes, by name.
fn symbol_sizes() -> Result<HashMap<String, u64>> {
    let listed = Command::new("nm").args(["-S", PROGRAM]).output().context("running nm")?;
    let mut sizes = HashMap::new();
    for line in String::from_utf8(listed.stdout)?.lines() {
        if let [_, size, "t" | "T", name] = line.split(' ').collect::<Vec<_>>()[..] {
            sizes.insert(name.to_owned(), u64::from_str_radix(size, 16)?);
        }
    }
    ensure!(!sizes.is_empty(), "{PROGRAM} has no symbols");
    Ok(sizes)
}

/// Returns the patterns of section names, in the order of the functions.
///
/// The name of a generic function ends with a hash of its types, which depends on the compiler and the profile. A
/// pattern without the hash fits every build, but it also fits all other instances. So a function with many other
/// instances is named with its hash; in another build that name fits nothing, and the function stays where it is.
fn symbol_patterns(functions: &[String], sizes: &HashMap<String, u64>) -> Vec<String> {
    let mut all: HashMap<&str, u64> = HashMap::new();
    for (name, size) in sizes {
        *all.entry(any_instance(name)).or_default() += size;
    }
    let mut used: HashMap<&str, u64> = HashMap::new();
    for name in functions {
        let size = sizes.get(name).copied().unwrap_or_default();
        *used.entry(any_instance(name)).or_default() += size;
    }
    let mut known = HashSet::new();
    let pattern = |name: &String| {
        let any = any_instance(name);
        let are_most_used = all.get(any).unwrap_or(&0) <= &(2 * used[any] + SMALL_BYTES);
        let text = if are_most_used { any } else { one_instance(name) };
        known.insert(text.to_owned()).then(|| format!("{text}*"))
    };
    functions.iter().filter_map(pattern).collect()
}

/// Returns the name without its hash: the common beginning of the names of all instances.
fn any_instance(name: &str) -> &str {
    hash_place(name).map_or_else(|| one_instance(name), |place| &name[..place])
}

/// Returns the name without what the compiler adds to a function that it has moved.
fn one_instance(name: &str) -> &str {
    let plain = name.find(".llvm.").map_or(name, |end| &name[..end]);
    hash_place(plain).map_or(plain, |place| &plain[..place + HASH_LENGTH])
}

/// Returns the place of a name's hash, behind the `17h` that announces it.
fn hash_place(name: &str) -> Option<usize> {
    let place = name.rfind("17h")? + 3;
    let hash = name.get(place..place + HASH_LENGTH)?;
    hash.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(place)
}

const HEAD: &str = "/* The functions of the start and of calls, most used first. `docker/link.rs` gives this file to the linker.
   Made by: cargo bench --locked --bench instructions -- --write-order */
SECTIONS {
  .text : {
";

const TAIL: &str = "  }
}
INSERT BEFORE .fini;
";

/// The digits of a hash.
const HASH_LENGTH: usize = 16;

/// The calls of a profile.
const CALLS: u32 = 400;

/// The frames of a profile's stream.
const FRAMES: u32 = 400;

/// The size, in bytes, up to which further instances of a function are taken along.
const SMALL_BYTES: u64 = 256;

/// The share of the executed functions that the script must cover. Our choice: each function beyond it is a page.
const MIN_COVERED_PERCENT: usize = 90;
