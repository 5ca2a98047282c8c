//! Attempts on files and mounts: files of the host, files that hold the sandbox together, and set-user-ID programs.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::ptr;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, answered};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    attempt("an engine's socket", |_| present(SOCKETS)),
    attempt("the host's secrets", |_| all(SECRETS, |path| AttemptOutcome::of(fs::read(path)))),
    attempt("a device of the host", |_| {
        all(DEVICES, |path| AttemptOutcome::of(OpenOptions::new().read(true).open(path)))
    }),
    attempt("writing outside of its own places", |_| {
        all(PLACES, |path| AttemptOutcome::of(create(path)))
    }),
    attempt("the kernel's settings", |_| all(SETTINGS, |path| AttemptOutcome::of(write(path)))),
    attempt("what /proc tells of the kernel", |_| all(TELLING, masked_file)),
    attempt("cgroups of its own", |_| {
        all(CGROUPS, |path| AttemptOutcome::of(fs::create_dir(Path::new(path).join("mine"))))
    }),
    attempt("the run's socket taken away", |_| {
        AttemptOutcome::of(fs::remove_file("/llm-sock/llm.sock"))
    }),
    attempt("the run's socket replaced", |_| {
        AttemptOutcome::of(symlink("/tmp/mine", "/llm-sock/other"))
    }),
    attempt("the first process written over", |_| {
        AttemptOutcome::of(OpenOptions::new().write(true).open("/cogni-init"))
    }),
    attempt("a program in /tmp", |_| AttemptOutcome::of(program("/tmp/x"))),
    attempt("a program in /run", |_| AttemptOutcome::of(program("/run/x"))),
    attempt("a mount", |_| AttemptOutcome::of(mount("tmpfs", "/tmp", 0))),
    attempt("a bind mount", |_| AttemptOutcome::of(mount("/", "/tmp", libc::MS_BIND))),
    attempt("a remount for writing", |_| AttemptOutcome::of(mount("none", "/", libc::MS_REMOUNT))),
    attempt("an unmount", |_| AttemptOutcome::of(call(libc::SYS_umount2, "/tmp"))),
    attempt("the new calls for mounts", |_| AttemptOutcome::of(call(libc::SYS_fsopen, "tmpfs"))),
    attempt("another root", |_| AttemptOutcome::of(call(libc::SYS_chroot, "/tmp"))),
    attempt("the root put elsewhere", |_| AttemptOutcome::of(call(libc::SYS_pivot_root, "/tmp"))),
    attempt("a block device made", |_| AttemptOutcome::of(device(libc::S_IFBLK, 8))),
    attempt("a character device made", |_| AttemptOutcome::of(device(libc::S_IFCHR, 1))),
    attempt("a file by its handle", |_| AttemptOutcome::of(call(libc::SYS_open_by_handle_at, "/"))),
    attempt("a set-user-id program of the host", |_| AttemptOutcome::of(chown())),
    attempt("a hard link to the host's file", |_| {
        AttemptOutcome::of(fs::hard_link("/cogni-init", "/workspace/init"))
    }),
    attempt("the way up from its directories", |_| up()),
    attempt("another process' root", |_| all(ROOTS, |path| AttemptOutcome::of(fs::read(path)))),
];

const fn attempt(what: &'static str, make: fn(&HostFacts) -> AttemptOutcome) -> EscapeAttempt {
    EscapeAttempt { area: "files", what, make }
}

fn all(paths: &[&str], attempt: impl Fn(&str) -> AttemptOutcome) -> AttemptOutcome {
    AttemptOutcome::all(paths.iter().map(|path| ((*path).to_owned(), attempt(path))))
}

fn present(paths: &[&str]) -> AttemptOutcome {
    all(paths, |path| AttemptOutcome::of(fs::symlink_metadata(path)))
}

fn create(directory: &str) -> io::Result<()> {
    let path = Path::new(directory).join("written");
    let made = fs::write(&path, "");
    let _ = fs::remove_file(&path);
    made
}

fn write(path: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(b"1")
}

/// A masked file exists and is empty.
fn masked_file(path: &str) -> AttemptOutcome {
    match fs::read(path) {
        Ok(text) => AttemptOutcome::expect(text.is_empty(), format!("{} bytes", text.len())),
        Err(error) => AttemptOutcome::of(Err::<(), _>(error)),
    }
}

fn program(path: &str) -> io::Result<()> {
    fs::write(path, "#!/cogni-init --version\n")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    let done = std::process::Command::new(path).status().map(drop);
    fs::remove_file(path)?;
    done
}

fn mount(source: &str, target: &str, flags: libc::c_ulong) -> io::Result<i64> {
    let (source, target) = (text(source), text(target));
    let kind = text("tmpfs");
    // SAFETY: the texts live through the call.
    let done =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) };
    answered(done)
}

/// Makes a call whose first argument is a path, and whose second argument is a path or ignored.
fn call(number: libc::c_long, path: &str) -> io::Result<i64> {
    let path = text(path);
    // SAFETY: the text lives through the call; the kernel checks the rest.
    answered(unsafe { libc::syscall(number, path.as_ptr(), path.as_ptr(), 0, 0, 0) })
}

fn device(kind: libc::mode_t, major: u32) -> io::Result<i64> {
    let path = text("/tmp/device");
    // SAFETY: the text lives through the call.
    answered(unsafe { libc::mknod(path.as_ptr(), kind | 0o666, libc::makedev(major, 1)) })
}

fn chown() -> io::Result<()> {
    fs::write("/tmp/owned", "")?;
    std::os::unix::fs::chown("/tmp/owned", Some(0), Some(0))
}

/// Above the workspace and the socket's directory, there is only the sandbox's own root.
fn up() -> AttemptOutcome {
    let ways = ["/workspace", "/llm-sock", "/tmp"].map(|from| {
        let top = format!("{from}/../../../../../../..");
        let same = fs::canonicalize(&top).is_ok_and(|found| found == Path::new("/"));
        (from.to_owned(), AttemptOutcome::expect(same, "the same root"))
    });
    AttemptOutcome::all(ways)
}

fn text(text: &str) -> CString {
    CString::new(text).expect("the texts above hold no zero byte")
}

const SOCKETS: &[&str] = &[
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/podman/podman.sock",
    "/run/dbus/system_bus_socket",
    "/run/systemd/private",
];

const SECRETS: &[&str] =
    &["/etc/shadow", "/etc/gshadow", "/root/.ssh", "/root/.cargo/config.toml", "/root/.bashrc"];

const DEVICES: &[&str] =
    &["/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse", "/dev/net/tun"];

const PLACES: &[&str] =
    &["/", "/bin", "/dev", "/etc", "/lib", "/llm-sock", "/proc", "/sys", "/usr", "/var"];

const SETTINGS: &[&str] = &[
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/hostname",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/vm/drop_caches",
    "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj",
    "/sys/kernel/uevent_helper",
    "/sys/power/state",
];

const TELLING: &[&str] =
    &["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/latency_stats", "/proc/kmsg"];

const CGROUPS: &[&str] =
    &["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/unified"];

const ROOTS: &[&str] = &["/proc/1/root/etc/shadow", "/proc/1/mem"];
