//! R2: Tests of sandboxes of a user who is not root. Some kernels do not let such a user make sandboxes; the test then
//! reports that.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{self, Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::driver::list_containers;
use crate::support::process::{ChildProcess, wait_until};

/// R2: A sandbox without limits must be allowed explicitly.
#[test]
fn a_sandbox_without_limits_has_to_be_allowed() {
    let public_dir = PublicDir::new();
    let output = public_dir.run(&[], "true");
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(
        String::from_utf8(output.stderr).unwrap().trim(),
        @r"error: no limits on memory, processes and processors can be set here: only root may; allow it to do without them with `--allow-unlimited`"
    );
}

/// R3: Everything else holds: no rights, no network, and a user that does not exist on this machine.
#[test]
fn another_user_than_root_has_a_sandbox_with_all_but_limits() {
    let public_dir = PublicDir::new();
    let look = "id -u; id -g; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status; ls /sys/class/net; \
                unshare -r true 2>/dev/null && echo unshared; touch /usr/x /etc/x 2>/dev/null && echo wrote; \
                touch /tmp/x /workspace/x && echo fine; exit 42";
    let output = public_dir.run(&["--allow-unlimited"], look);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    if !public_dir.can_make_namespaces() {
        assert_eq!(result["error_code"], json!("internal"), "{result}");
        return;
    }
    assert_eq!(result["exit_code"], json!(42), "{result}");
    insta::assert_snapshot!(result["stdout"].as_str().unwrap(), @r"
    1001
    1001
    CapInh:	0000000000000000
    CapPrm:	0000000000000000
    CapEff:	0000000000000000
    CapBnd:	0000000000000000
    CapAmb:	0000000000000000
    NoNewPrivs:	1
    Seccomp:	2
    lo
    fine
    ");
    assert_eq!(fs::read_dir(public_dir.path().join("r")).unwrap().count(), 0);
}

/// R6: The user's own directories are accessible to the sandbox, whose user is the same on this machine.
#[test]
fn another_user_than_root_shares_its_own_directories() {
    let public_dir = PublicDir::new();
    let task = public_dir.path().join("task");
    fs::create_dir(&task).unwrap();
    fs::set_permissions(&task, Permissions::from_mode(0o700)).unwrap();
    chown(&task, Some(UNPRIVILEGED_USER), Some(UNPRIVILEGED_USER)).unwrap();
    let output = public_dir.run(&["--allow-unlimited", "--workspace", "task:rw"], "touch answer");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    if public_dir.can_make_namespaces() {
        assert_eq!(result["ok"], json!(true), "{result}");
        assert!(task.join("answer").exists());
    }
}

/// R3: A copy in memory makes the sandbox, and not the program's file, which its user may own (CVE-2019-5736).
#[test]
fn the_program_of_another_user_than_root_is_not_within_reach() {
    let public_dir = PublicDir::new();
    if !public_dir.can_make_namespaces() {
        return;
    }
    let run = format!("run-sealed-{}", process::id());
    let flags = ["--allow-unlimited", "--run-id", &run];
    let mut command = ChildProcess::start(&mut public_dir.prepare(&flags, "sleep 600"), "");
    let helper = || {
        let is_helper = |pid: &&str| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"cogni-sandbox\0")
        };
        list_containers(&run).split(' ').find(is_helper).map(str::to_owned)
    };
    wait_until(|| helper().is_some(), || "there is no helper".to_owned());
    let pid = helper().unwrap();
    let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    assert!(program.starts_with("/memfd:cogni-sandbox (deleted)"), "{}", program.display());
    let changed = File::options().write(true).open(format!("/proc/{pid}/exe"));
    assert!(changed.and_then(|file| file.set_len(0)).is_err());
    command.signal("TERM");
    command.wait();
}

/// A directory that every user can enter, with programs that every user can execute.
struct PublicDir(TempDir);

impl PublicDir {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        for program in
            [env!("CARGO_BIN_EXE_cogni-gateway"), concat!(env!("OUT_DIR"), "/cogni-init")]
        {
            let name = Path::new(program).file_name().unwrap();
            fs::copy(program, directory.path().join(name)).unwrap();
        }
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, flags: &[&str], script: &str) -> Output {
        self.prepare(flags, script).output().unwrap()
    }

    fn prepare(&self, flags: &[&str], script: &str) -> Command {
        let mut command = self.as_nobody(self.path().join("cogni-gateway").to_str().unwrap());
        command
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-real")
            .env("LITELLM_HOST", "127.0.0.1:9")
            .env("LOG", "off")
            .env("COGNI_DRIVER", "embedded")
            .env("COGNI_RUN_DIR", self.path().join("r"))
            .arg("run")
            .args(flags)
            .args(["--", "sh", "-c", script]);
        command
    }

    /// Tries with another program what the runtime has to do.
    fn can_make_namespaces(&self) -> bool {
        let all =
            "--user --map-root-user --mount --uts --ipc --net --pid --cgroup --fork --mount-proc";
        self.as_nobody("unshare").args(all.split(' ')).arg("true").status().unwrap().success()
    }

    fn as_nobody(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        let (user, group) =
            (format!("--reuid={UNPRIVILEGED_USER}"), format!("--regid={UNPRIVILEGED_USER}"));
        command.args([&user, &group, "--clear-groups", program]);
        command.env_clear().env("PATH", "/usr/bin:/bin").current_dir(self.path());
        command
    }
}

const UNPRIVILEGED_USER: u32 = 65534;
