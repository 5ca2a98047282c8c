//! R3: Tests of what a program sees in its sandbox, and of what it cannot do.

use serde_json::json;

use super::driver::{TestedRunner, shell_argv};
use crate::support::run_command::landlock_version;

/// R3: The kernel reports no network, no rights and no writable place.
#[test]
fn a_sandbox_has_no_network_no_rights_and_no_place_to_write() {
    let look = "
        [ $(id -u) -ge 2100000000 ] && [ \"$(id -u) $(id -u)\" = \"$(id -g) $(id -G)\" ] && echo 'a user of its own'
        ls /sys/class/net
        grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status
        grep -c . /proc/net/route
        for place in / /etc /usr /llm-sock /sys /proc/sys/kernel; do touch $place/x 2>/dev/null && echo \"wrote $place\"; done
        echo 'echo ran' > /tmp/x; chmod +x /tmp/x; /tmp/x 2>/dev/null
        echo 'echo ran in the workspace' > x; chmod +x x; ./x
        cat /proc/1/oom_score_adj
        ulimit -n; ulimit -c
        grep -E ' (/tmp|/run|/workspace|/llm-sock) ' /proc/mounts | sed -E 's/^[^ ]+ ([^ ]+) [^ ]+ ([^ ,]+).*/\\1 \\2/' | sort
        ls /var/run/docker.sock /run/docker.sock 2>/dev/null
        # In a cgroup namespace of its own, each cgroup of the sandbox is the root.
        grep -v ':/$' /proc/self/cgroup
        true
    ";
    let result = TestedRunner::new().run(&[], &shell_argv(look));
    assert_eq!(result.facts(), json!([true, 0, null]));
    insta::assert_snapshot!(result.json["stdout"].as_str().unwrap(), @r"
    a user of its own
    lo
    CapInh:	0000000000000000
    CapPrm:	0000000000000000
    CapEff:	0000000000000000
    CapBnd:	0000000000000000
    CapAmb:	0000000000000000
    NoNewPrivs:	1
    Seccomp:	2
    1
    ran in the workspace
    500
    1024
    0
    /llm-sock ro
    /run rw
    /tmp rw
    /workspace rw
    ");
}

/// R3: Landlock denies writes that mounts and modes would allow, and allows the intended ones.
#[test]
fn writes_that_only_landlock_denies_are_denied() {
    let look = "
        echo x 2>/dev/null > /proc/self/comm && echo 'named itself'
        kill -0 1 2>/dev/null && echo 'could signal the first process'
        for place in /tmp /run /dev/shm /workspace; do
            (mkdir -p $place/a && echo x > $place/a/x && mv $place/a/x $place/x && rm -r $place/a $place/x) || echo \"not $place\"
        done
        echo x > /dev/null
    ";
    let result = TestedRunner::new().run(&[], &shell_argv(look));
    let expected = match landlock_version() {
        6.. => "",
        2.. => "could signal the first process\n",
        _ => "named itself\ncould signal the first process\n",
    };
    assert_eq!(result.json["stdout"], expected, "{}", result.json);
    assert_eq!(result.facts(), json!([true, 0, null]));
}

/// R3: Each of these calls fails. A call that does not exist would prove nothing, so it is reported.
#[test]
fn dangerous_system_calls_are_denied() {
    let attempts = "
        try() { \"$@\" >/dev/null 2>&1 </dev/null; case $? in 0) echo \"did $*\";; 127) echo \"no $1 here\";; esac; }
        try unshare -r true
        try mount -t tmpfs none /tmp
        try chroot / true
        try mknod /tmp/sda b 8 0
        try rm /llm-sock/llm.sock
        try mv /llm-sock/llm.sock /llm-sock/other
        try chmod 777 /llm-sock/llm.sock
        try busybox nc -w 1 1.1.1.1 53
        try busybox nslookup example.com
        try su -c true
        try dd if=/dev/zero of=/proc/sys/kernel/randomize_va_space
        try dmesg
    ";
    let result = TestedRunner::new().run(&[], &shell_argv(attempts));
    assert_eq!(result.json["stdout"], "");
}

/// R3: A fork bomb stops at the sandbox's own limit.
#[test]
fn processes_are_limited() {
    let bomb =
        "i=0; while [ $i -lt 40 ]; do sleep 600 & i=$((i+1)); done; ls -d /proc/[0-9]* | wc -l";
    let result = TestedRunner::new().run(&["--pids", "16"], &shell_argv(bomb));
    let stderr = result.json["stderr"].as_str().unwrap();
    assert!(stderr.contains("fork"), "{}", result.json);
}

/// R3: Files in memory count as memory, and have their own limits.
#[test]
fn files_in_memory_are_limited() {
    let fill = "dd if=/dev/zero of=/tmp/x bs=1M count=100 2>/dev/null; wc -c < /tmp/x; dd if=/dev/zero of=/run/x bs=1M count=100 2>/dev/null; wc -c < /run/x";
    let result = TestedRunner::new().run(&[], &shell_argv(fill));
    assert_eq!(result.json["stdout"], format!("{}\n{}\n", 64 << 20, 8 << 20));
}
