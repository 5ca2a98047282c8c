//! The programs that an answer never allows for all runs: interpreters, whose work is decided by what they read, and programs
//! that start other programs.
//!
//! The program that runs is judged, not its name in `argv`: links are followed, a copy or a second name of a known
//! interpreter counts as the interpreter, and so does every program that any word of `argv` or `env` names. A program that
//! cannot be judged counts as an interpreter: one in an image, a script, and a file that the kernel gives to another program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::job::ToolJob;
use crate::base::file_digest::{FileDigest, FileDigestCache};
use crate::sandbox::spec::oci::DEFAULT_PATH;

/// Returns true if a program is an interpreter, starts another program, or cannot be judged. `files` has the files of this
/// machine that each name in the program stands for.
pub(super) fn may_interpret(
    job: &ToolJob,
    files: &BTreeMap<String, Vec<FileDigest>>,
    cache: &FileDigestCache,
) -> bool {
    let Some(program) = job.argv.first() else { return true };
    // 1. The program that is executed: a native program, under each path that it may have.
    let Some(found) = files.get(program).filter(|found| !found.is_empty()) else { return true };
    if found.iter().any(|file| !file.is_native) {
        return true;
    }
    // 2. The program may start what a later word names, so each word counts.
    let named = files.iter().filter(|(_, found)| !found.is_empty());
    if named.clone().any(|(name, _)| is_interpreter_path(Path::new(name))) {
        return true;
    }
    let mut found = named.flat_map(|(_, found)| found);
    // 3. A copy or a second name of an interpreter has its content.
    let known = known_interpreters();
    found.any(|file| is_interpreter_path(&file.path) || is_copy(file, &known, cache))
}

/// Returns true if a file has the content of a known interpreter. Only one of the same length is read.
fn is_copy(file: &FileDigest, known: &[(u64, PathBuf)], cache: &FileDigestCache) -> bool {
    let same = known.iter().filter(|(bytes, _)| *bytes == file.bytes);
    same.map(|(_, path)| cache.read_digest(path)).any(|known| match known {
        Ok(Some(known)) => known.content == file.content,
        // A file that cannot be compared may be the same.
        Ok(None) | Err(_) => true,
    })
}

fn is_interpreter_path(path: &Path) -> bool {
    let Some(name) = path.file_name() else { return false };
    // A name that is no text cannot be judged.
    name.to_str().is_none_or(is_interpreter_name)
}

/// Returns true if a name is that of an interpreter, also with a version or a variant: `python3.11`, `bash-static`.
fn is_interpreter_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let stem = name.split(|letter: char| !letter.is_ascii_alphabetic()).next().unwrap_or_default();
    // The loader of shared libraries runs the program in its arguments: `ld-linux-x86-64.so.2`, `ld.so`, `ld-musl-x86_64.so.1`.
    let is_loader = name.starts_with("ld") && name.contains(".so");
    is_loader || INTERPRETERS.contains(&&*name) || INTERPRETERS.contains(&stem)
}

/// Returns the interpreters of this machine with their lengths in bytes.
fn known_interpreters() -> Vec<(u64, PathBuf)> {
    let directories = DEFAULT_PATH.split(':').map(Path::new);
    let paths = directories.flat_map(|directory| INTERPRETERS.map(|name| directory.join(name)));
    let measure = |path: PathBuf| Some((fs::metadata(&path).ok()?.len(), path));
    paths.filter_map(measure).collect()
}

/// The names of interpreters, of programs that run the program in their arguments, and of programs with a command for it, in
/// small letters. Our choice, from the shells and languages of Debian 12, its util-linux and coreutils, and `GTFOBins`
/// (<https://gtfobins.github.io>).
const INTERPRETERS: [&str; 209] = [
    // Shells.
    "sh",
    "ash",
    "bash",
    "rbash",
    "dash",
    "zsh",
    "ksh",
    "mksh",
    "lksh",
    "pdksh",
    "oksh",
    "yash",
    "posh",
    "rc",
    "es",
    "fish",
    "csh",
    "tcsh",
    "elvish",
    "nu",
    "pwsh",
    "xonsh",
    "busybox",
    "toybox",
    "coreutils",
    "sash",
    "rush",
    "git-shell",
    // Languages.
    "python",
    "python2",
    "python3",
    "pypy",
    "ipython",
    "perl",
    "ruby",
    "irb",
    "jruby",
    "node",
    "nodejs",
    "deno",
    "bun",
    "qjs",
    "js",
    "php",
    "lua",
    "luajit",
    "tclsh",
    "wish",
    "expect",
    "r",
    "rscript",
    "julia",
    "octave",
    "java",
    "jshell",
    "jrunscript",
    "jdb",
    "jjs",
    "kotlin",
    "scala",
    "groovy",
    "clojure",
    "erl",
    "escript",
    "elixir",
    "iex",
    "ghci",
    "runghc",
    "runhaskell",
    "ocaml",
    "guile",
    "racket",
    "sbcl",
    "clisp",
    "ecl",
    "emacs",
    "swipl",
    "gprolog",
    "mono",
    "dotnet",
    "go",
    "gcc",
    "g++",
    "clang",
    "lli",
    "tcc",
    "cargo",
    "awk",
    "gawk",
    "mawk",
    "nawk",
    "original-awk",
    "sed",
    "m4",
    "bc",
    "dc",
    "gnuplot",
    "gdb",
    "lldb",
    "jq",
    "wasmtime",
    "qemu",
    "wine",
    // Programs that start the program in their arguments.
    "env",
    "xargs",
    "find",
    "fd",
    "parallel",
    "timeout",
    "nice",
    "ionice",
    "chrt",
    "taskset",
    "numactl",
    "nohup",
    "setsid",
    "stdbuf",
    "unbuffer",
    "time",
    "watch",
    "entr",
    "flock",
    "setarch",
    "linux32",
    "linux64",
    "i386",
    "x86_64",
    "uname26",
    "chroot",
    "unshare",
    "nsenter",
    "setpriv",
    "capsh",
    "prlimit",
    "choom",
    "runuser",
    "su",
    "sudo",
    "doas",
    "pkexec",
    "script",
    "start-stop-daemon",
    "run-parts",
    "systemd-run",
    "bwrap",
    "firejail",
    "fakeroot",
    "strace",
    "ltrace",
    "perf",
    "valgrind",
    "catchsegv",
    "tini",
    "dumb-init",
    "socat",
    "nc",
    "ncat",
    "aa-exec",
    "chronic",
    "crun",
    "dbus-run-session",
    "fakechroot",
    "ifne",
    "ip",
    "lckdo",
    "logsave",
    "mispipe",
    "msgexec",
    "newgrp",
    "not",
    "pee",
    "runc",
    "runcon",
    "sg",
    "switch_root",
    "systemd-cat",
    "systemd-inhibit",
    "systemd-socket-activate",
    "uclampset",
    "vipe",
    // Programs with a command that starts another one.
    "ssh",
    "scp",
    "sftp",
    "rsync",
    "git",
    "tar",
    "cpio",
    "zip",
    "make",
    "gmake",
    "ninja",
    "vi",
    "vim",
    "nvim",
    "ex",
    "ed",
    "less",
    "more",
    "man",
    "sqlite3",
    "psql",
    "mysql",
    "docker",
    "podman",
    "nerdctl",
    "ctr",
    "kubectl",
    "gpg-agent",
    "groff",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_an_interpreter_may_have_a_version() {
        for name in [
            "python3.11",
            "perl5.36-x86_64-linux-gnu",
            "Rscript",
            "lua5.4",
            "ld-musl-x86_64.so.1",
            "tclsh8.6",
        ] {
            assert!(is_interpreter_name(name), "{name}");
        }
        for name in ["wc", "count", "shuf", "nodeinfo", "ldd", "environment"] {
            assert!(!is_interpreter_name(name), "{name}");
        }
    }
}
