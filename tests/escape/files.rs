//! Attempts on files and mounts: files of the host, files that hold the sandbox together, and set-user-ID programs.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::ptr;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, call_result};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    file_attempt("an engine's socket", |_| find_present(SOCKETS)),
    file_attempt("the host's secrets", |_| {
        try_all(SECRETS, |path| AttemptOutcome::of(fs::read(path)))
    }),
    file_attempt("a device of the host", |_| {
        try_all(DEVICES, |path| AttemptOutcome::of(OpenOptions::new().read(true).open(path)))
    }),
    file_attempt("writing outside of its own places", |_| {
        try_all(PLACES, |path| AttemptOutcome::of(create_file(path)))
    }),
    file_attempt("the kernel's settings", |_| {
        try_all(SETTINGS, |path| AttemptOutcome::of(write_file(path)))
    }),
    file_attempt("what /proc tells of the kernel", |_| try_all(TELLING, masked_file)),
    file_attempt("cgroups of its own", |_| {
        try_all(CGROUPS, |path| AttemptOutcome::of(fs::create_dir(Path::new(path).join("mine"))))
    }),
    file_attempt("the run's socket taken away", |_| {
        AttemptOutcome::of(fs::remove_file("/llm-sock/llm.sock"))
    }),
    file_attempt("the run's socket replaced", |_| {
        AttemptOutcome::of(symlink("/tmp/mine", "/llm-sock/other"))
    }),
    file_attempt("the first process written over", |_| {
        AttemptOutcome::of(OpenOptions::new().write(true).open("/cogni-init"))
    }),
    file_attempt("a program in /tmp", |_| AttemptOutcome::of(run_program("/tmp/x"))),
    file_attempt("a program in /run", |_| AttemptOutcome::of(run_program("/run/x"))),
    file_attempt("a mount", |_| AttemptOutcome::of(try_mount("tmpfs", "/tmp", 0))),
    file_attempt("a bind mount", |_| AttemptOutcome::of(try_mount("/", "/tmp", libc::MS_BIND))),
    file_attempt("a remount for writing", |_| {
        AttemptOutcome::of(try_mount("none", "/", libc::MS_REMOUNT))
    }),
    file_attempt("an unmount", |_| AttemptOutcome::of(call_with_path(libc::SYS_umount2, "/tmp"))),
    file_attempt("the new calls for mounts", |_| {
        AttemptOutcome::of(call_with_path(libc::SYS_fsopen, "tmpfs"))
    }),
    file_attempt("another root", |_| AttemptOutcome::of(call_with_path(libc::SYS_chroot, "/tmp"))),
    file_attempt("the root put elsewhere", |_| {
        AttemptOutcome::of(call_with_path(libc::SYS_pivot_root, "/tmp"))
    }),
    file_attempt("a block device made", |_| AttemptOutcome::of(make_device(libc::S_IFBLK, 8))),
    file_attempt("a character device made", |_| AttemptOutcome::of(make_device(libc::S_IFCHR, 1))),
    file_attempt("a file by its handle", |_| {
        AttemptOutcome::of(call_with_path(libc::SYS_open_by_handle_at, "/"))
    }),
    file_attempt("a set-user-id program of the host", |_| AttemptOutcome::of(chown_file())),
    file_attempt("a hard link to the host's file", |_| {
        AttemptOutcome::of(fs::hard_link("/cogni-init", "/workspace/init"))
    }),
    file_attempt("the way up from its directories", |_| leave_root()),
    file_attempt("another process' root", |_| {
        try_all(ROOTS, |path| AttemptOutcome::of(fs::read(path)))
    }),
];

const fn file_attempt(what: &'static str, make: fn(&HostFacts) -> AttemptOutcome) -> EscapeAttempt {
    EscapeAttempt { area: "files", what, make }
}

fn try_all(paths: &[&str], attempt: impl Fn(&str) -> AttemptOutcome) -> AttemptOutcome {
    AttemptOutcome::all(paths.iter().map(|path| ((*path).to_owned(), attempt(path))))
}

fn find_present(paths: &[&str]) -> AttemptOutcome {
    try_all(paths, |path| AttemptOutcome::of(fs::symlink_metadata(path)))
}

fn create_file(directory: &str) -> io::Result<()> {
    let path = Path::new(directory).join("written");
    let made = fs::write(&path, "");
    let _ = fs::remove_file(&path);
    made
}

fn write_file(path: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(b"1")
}

/// A masked file exists and is empty.
fn masked_file(path: &str) -> AttemptOutcome {
    match fs::read(path) {
        Ok(text) => AttemptOutcome::expect(text.is_empty(), format!("{} bytes", text.len())),
        Err(error) => AttemptOutcome::of(Err::<(), _>(error)),
    }
}

fn run_program(path: &str) -> io::Result<()> {
    fs::write(path, "#!/cogni-init --version\n")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    let done = std::process::Command::new(path).status().map(drop);
    fs::remove_file(path)?;
    done
}

fn try_mount(source: &str, target: &str, flags: libc::c_ulong) -> io::Result<i64> {
    let (source, target) = (c_string(source), c_string(target));
    let kind = c_string("tmpfs");
    // SAFETY: the texts live through the call.
    let done =
        unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) };
    call_result(done)
}

/// Makes a call whose first argument is a path, and whose second argument is a path or ignored.
fn call_with_path(number: libc::c_long, path: &str) -> io::Result<i64> {
    let path = c_string(path);
    // SAFETY: the text lives through the call; the kernel checks the rest.
    call_result(unsafe { libc::syscall(number, path.as_ptr(), path.as_ptr(), 0, 0, 0) })
}

fn make_device(kind: libc::mode_t, major: u32) -> io::Result<i64> {
    let path = c_string("/tmp/device");
    // SAFETY: the text lives through the call.
    call_result(unsafe { libc::mknod(path.as_ptr(), kind | 0o666, libc::makedev(major, 1)) })
}

fn chown_file() -> io::Result<()> {
    fs::write("/tmp/owned", "")?;
    std::os::unix::fs::chown("/tmp/owned", Some(0), Some(0))
}

/// Above the workspace and the socket's directory, there is only the sandbox's own root.
fn leave_root() -> AttemptOutcome {
    let ways = ["/workspace", "/llm-sock", "/tmp"].map(|from| {
        let top = format!("{from}/../../../../../../..");
        let same = fs::canonicalize(&top).is_ok_and(|found| found == Path::new("/"));
        (from.to_owned(), AttemptOutcome::expect(same, "the same root"))
    });
    AttemptOutcome::all(ways)
}

fn c_string(text: &str) -> CString {
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
