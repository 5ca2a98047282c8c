//! R2, R3: Tests of the root file system of an embedded sandbox.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::driver::{TestedRunner, shell_argv};

/// R3: The root has the host's programs and what they need, and nothing of the host's users and services.
#[test]
fn a_sandbox_sees_the_hosts_programs_and_nothing_else() {
    let look = "
        ls /
        ls /etc | grep -E '^(passwd|group|hosts|nsswitch.conf|resolv.conf|shadow|sudoers|ssh|gitconfig|docker)$'
        ls /home /root /var /opt /srv /mnt 2>/dev/null
        cut -d: -f1 /etc/passwd
        getent hosts localhost | cut -d' ' -f1
        touch /usr/x /etc/x /etc/passwd 2>/dev/null && echo wrote
        id | sed -E 's/2[0-9]{9}/N/g'
    ";
    let result = TestedRunner::new().run(&[], &shell_argv(look));
    let stdout = result.json["stdout"].as_str().unwrap();
    // Not every machine has these directories.
    let stdout: Vec<_> =
        stdout.lines().filter(|line| !matches!(*line, "lib32" | "libx32" | "lib64")).collect();
    insta::assert_snapshot!(stdout.join("\n"), @r"
    bin
    cogni-init
    dev
    etc
    lib
    llm-sock
    proc
    run
    sbin
    sys
    tmp
    usr
    workspace
    group
    hosts
    nsswitch.conf
    passwd
    resolv.conf
    root
    agent
    nobody
    127.0.0.1
    uid=N(agent) gid=N(agent) groups=N(agent)
    ");
}

/// R2: An unpacked root is used as it is, with missing files added, and is never written to.
#[test]
fn an_unpacked_root_takes_the_place_of_an_image() {
    let runner = TestedRunner::new();
    let rootfs = make_rootfs(&runner.path().join("rootfs"));
    let before = list_path(&rootfs);
    let root = runner.path().display().to_string();
    let flags = ["--root", &root, "--rootfs", &rootfs, "--init", "none"];
    let look =
        "cat /etc/motd; ls /; touch /etc/x /bin/x 2>/dev/null && echo wrote; echo $$; exit 42";
    let result = runner.run(&flags, &shell_argv(look));
    assert_eq!(result.facts(), json!([false, 42, "container_failed"]), "{}", result.json);
    insta::assert_snapshot!(result.json["stdout"].as_str().unwrap(), @r"
    hello
    bin
    dev
    etc
    llm-sock
    proc
    run
    sys
    tmp
    usr
    workspace
    1
    ");
    assert_eq!(list_path(&rootfs), before);
}

/// R3: The engine's socket of this machine is in no sandbox, whichever driver makes it.
#[test]
fn the_engines_socket_is_in_no_embedded_sandbox() {
    let runner = TestedRunner::new();
    let dir = runner.path().join("place");
    fs::create_dir(&dir).unwrap();
    let (root, socket) = (runner.path().display().to_string(), dir.join("docker.sock"));
    let workspace = format!("{}:ro", dir.display());
    let flags = ["--root", &root, "--workspace", &workspace];
    let engine = ["--docker-socket", socket.to_str().unwrap()];
    let (status, _, stderr) = runner.command(&[&flags[..], &engine].concat(), &["true"]);
    assert!(status == 2 && stderr.contains("the gateway's own"), "{status}: {stderr}");
    assert_eq!(runner.run(&flags, &["true"]).facts(), json!([true, 0, null]));
}

/// R1: Without `cogni-init`, the program itself is the first process, and the runner reports a shell's errors.
#[test]
fn a_missing_program_is_reported_without_cogni_init_too() {
    let runner = TestedRunner::new();
    for (program, code) in [("/nowhere", 127), ("nowhere", 127), ("/etc/passwd", 126)] {
        let result = runner.run(&["--init", "none"], &[program]);
        assert_eq!(result.facts(), json!([false, code, "container_failed"]), "{program}");
        assert!(result.json["error"].as_str().unwrap().starts_with("the program "));
    }
}

/// R2: Each driver reports the kinds of root that it does not support.
#[test]
fn a_root_that_a_driver_does_not_know_is_wrong_use() {
    let runner = TestedRunner::new();
    let messages = [
        &["--image", "agent:1"][..],
        &["--driver", "docker"],
        &["--image", "agent:1", "--rootfs", "/srv"],
        &["--rootfs", "/"],
        &["--rootfs", "/nowhere"],
    ]
    .map(|flags| {
        let (status, stdout, shown) = runner.command(flags, &["true"]);
        assert_eq!((status, stdout.as_str()), (2, ""), "{flags:?}");
        shown.trim().to_owned()
    });
    insta::assert_snapshot!(messages.join("\n"), @r"
    error: the root is `agent:1`; the driver `embedded` knows no images; give an unpacked root, or none
    error: the root is `this machine's programs`; the driver `docker` needs an image
    error: the image is `agent:1`, the root `/srv`; give one of them
    error: `/` cannot be given to a sandbox: it would show `/boot`, which no sandbox may see
    error: `/nowhere` cannot be given to a sandbox: it does not exist; make it first, or correct the path
    ");
}

/// Makes a root with busybox and a link to a directory, as images have it.
fn make_rootfs(path: &Path) -> String {
    for directory in ["usr/bin", "etc"] {
        fs::create_dir_all(path.join(directory)).unwrap();
    }
    symlink("usr/bin", path.join("bin")).unwrap();
    fs::write(path.join("etc/motd"), "hello\n").unwrap();
    let busybox = Command::new("sh").args(["-c", "command -v busybox"]).output().unwrap();
    let busybox = String::from_utf8(busybox.stdout).unwrap();
    assert_ne!(busybox, "", "this test needs busybox; `tests/run test` installs it");
    fs::copy(busybox.trim(), path.join("usr/bin/busybox")).unwrap();
    for applet in ["sh", "cat", "ls", "touch"] {
        symlink("busybox", path.join("usr/bin").join(applet)).unwrap();
    }
    for directory in ["", "usr", "usr/bin", "etc"] {
        fs::set_permissions(path.join(directory), fs::Permissions::from_mode(0o755)).unwrap();
    }
    path.display().to_string()
}

fn list_path(path: &str) -> String {
    let found = Command::new("find").args([path, "-printf", "%P %M %s %T@\n"]).output().unwrap();
    String::from_utf8(found.stdout).unwrap()
}
