//! R3, R6: Tests of host paths: a sandbox sees only allowed paths of this machine, and a path must be what it appears
//! to be.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cogni_gateway::sandbox::host_path::{OwnPaths, check_host_paths};
use cogni_gateway::sandbox::spec::{MountAccess, WorkspaceMount};
use cogni_gateway::sandbox::{SandboxSpec, UserRange};

fn check_path(path: &Path, root: &Path) -> Result<(), String> {
    judge_access(path, root, MountAccess::ReadOnly)
}

fn judge_access(path: &Path, root: &Path, access: MountAccess) -> Result<(), String> {
    let workspace = WorkspaceMount::Directory { path: path.into(), access };
    let spec = SandboxSpec { workspace, ..crate::spec::example_spec() };
    check_host_paths(&spec, UserRange::SHARED_USER, &[root.to_owned()], &OwnPaths::default())
        .map_err(|error| error.to_string())
}

#[test]
fn a_directory_below_a_root_is_let_in() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("task")).unwrap();
    set_owner(root.path(), 0, 0o755);
    check_path(&root.path().join("task"), root.path()).unwrap();
    check_path(root.path(), root.path()).unwrap();
}

#[test]
fn a_path_elsewhere_or_of_another_kind_is_kept_out() {
    let root = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("task/inner")).unwrap();
    symlink(at("task"), at("link")).unwrap();
    let _socket = UnixListener::bind(at("engine.sock")).unwrap();
    for path in [
        other.path().to_owned(),
        at("link"),
        at("link/inner"),
        at("engine.sock"),
        at("missing"),
        at("task/../task"),
        PathBuf::from("task"),
    ] {
        check_path(&path, root.path()).expect_err(&path.display().to_string());
    }
}

/// R3: These paths stay forbidden even if the operator allows every path.
#[test]
fn forbidden_paths_are_refused_below_every_root() {
    for path in ["/", "/var", "/run", "/etc/ssl", "/proc/self", "/dev/shm", "/sys"] {
        check_path(Path::new(path), Path::new("/")).expect_err(path);
    }
}

/// R3: A sandbox may see a file that decides about later runs, and must not change the file or a directory around it.
#[test]
fn a_file_that_decides_about_runs_cannot_be_changed() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("task/tools")).unwrap();
    let judge = |access| {
        let workspace = WorkspaceMount::Directory { path: at("task"), access };
        let spec = SandboxSpec { workspace, ..crate::spec::example_spec() };
        let decisive = vec![at("task/tools/clock.toml")];
        let own = OwnPaths { decisive, ..OwnPaths::default() };
        let judged =
            check_host_paths(&spec, UserRange::SHARED_USER, &[root.path().to_owned()], &own);
        judged.map_err(|error| error.to_string().replace(root.path().to_str().unwrap(), "ROOT"))
    };
    judge(MountAccess::ReadOnly).unwrap();
    insta::assert_snapshot!(judge(MountAccess::ReadWrite).unwrap_err(), @"`ROOT/task` cannot be given to a sandbox: the sandbox could change `ROOT/task/tools/clock.toml`, which decides about later runs; keep that elsewhere, or mount this path read-only");
}

/// R3: The agent could read secrets there, or change its own records.
#[test]
fn the_gateways_own_files_are_refused_everywhere() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir_all(at("task/records")).unwrap();
    fs::create_dir(at("keys")).unwrap();
    fs::write(at("keys/key"), "sk").unwrap();
    symlink(at("keys/key"), at("task/key")).unwrap();
    let judge = |path: &str, ours: &str| {
        let workspace = WorkspaceMount::Directory { path: at(path), access: MountAccess::ReadOnly };
        let spec = SandboxSpec { workspace, ..crate::spec::example_spec() };
        let own = OwnPaths { private: vec![at(ours)], ..OwnPaths::default() };
        check_host_paths(&spec, UserRange::SHARED_USER, &[root.path().to_owned()], &own)
    };
    for (path, ours, is_kept_out) in [
        ("task", "task", true),
        ("task", "task/records/audit.jsonl", true),
        ("task", "task/not/there/yet.jsonl", true),
        ("task/records", "task", true),
        // Both names are checked: the link's and the file's.
        ("task", "task/key", true),
        ("keys", "task/key", true),
        ("task", "keys/key", false),
        ("task/records", "task/key", false),
        ("task/records", "task/records.jsonl", false),
    ] {
        let judged = judge(path, ours);
        assert_eq!(judged.is_err(), is_kept_out, "{path}, {ours}: {judged:?}");
        if let Err(error) = judged {
            assert!(error.to_string().contains("the gateway's own"), "{error}");
        }
    }
}

/// R6: A path that a sandbox could exchange between the check and the mount is not mounted.
#[test]
fn a_path_that_a_sandbox_could_exchange_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (parent, task) = (root.path().join("parent"), root.path().join("parent/task"));
    fs::create_dir_all(&task).unwrap();
    for (owner, mode, task_owner, is_kept_out) in [
        (0, 0o755, 1001, false),
        (0, 0o777, 0, true),
        // As in `/tmp`: every user may rename their own files.
        (0, 0o1777, 0, false),
        (0, 0o1777, 1001, true),
        (1001, 0o755, 0, true),
        (1001, 0o1777, 0, true),
        (1000, 0o755, 0, false),
    ] {
        set_owner(&parent, owner, mode);
        set_owner(&task, task_owner, 0o755);
        let judged = check_path(&task, root.path());
        assert_eq!(judged.is_err(), is_kept_out, "{owner} {mode:o} {task_owner}: {judged:?}");
        // Directories above the root belong to the operator.
        check_path(&task, &task).unwrap();
    }
}

/// R6: Otherwise the sandbox's user would fail later, without an explanation.
#[test]
fn a_path_that_the_sandboxs_user_cannot_enter_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let task = root.path().join("task");
    fs::create_dir(&task).unwrap();
    for (owner, mode, may_read, may_write) in [
        (0, 0o755, true, false),
        (0, 0o700, false, false),
        (0, 0o777, true, true),
        (1001, 0o700, true, true),
        (1001, 0o500, true, false),
    ] {
        set_owner(&task, owner, mode);
        let is_let_in = |access| judge_access(&task, root.path(), access).is_ok();
        let outcomes = [MountAccess::ReadOnly, MountAccess::ReadWrite].map(is_let_in);
        assert_eq!(outcomes, [may_read, may_write], "{owner} {mode:o}");
    }
    let outcomes = judge_access(&task, root.path(), MountAccess::ReadWrite).unwrap_err();
    insta::assert_snapshot!(outcomes.replace(task.to_str().unwrap(), "TASK"), @"`TASK` cannot be given to a sandbox: user 1001, which the sandbox runs as, may not write there; `chown 1001` it, change its mode, or name another user with `--uid`");
}

/// R3, R6: The user of a sandbox is chosen later from a range, and a path that any sandbox may write, another sandbox
/// may exchange.
#[test]
fn a_sandbox_with_a_user_of_its_own_is_judged_as_any_user() {
    let root = tempfile::tempdir().unwrap();
    let (parent, task) = (root.path().join("parent"), root.path().join("parent/task"));
    fs::create_dir_all(&task).unwrap();
    let workspace = WorkspaceMount::Directory { path: task.clone(), access: MountAccess::ReadOnly };
    let spec = SandboxSpec { workspace, ..crate::spec::example_spec() };
    let roots = [root.path().to_owned()];
    for (owner, mode, task_mode, is_kept_out) in [
        (0, 0o755, 0o755, false),
        (0, 0o755, 0o700, true),
        (0, 0o1777, 0o755, false),
        (1001, 0o755, 0o755, true),
        (2_100_000_007, 0o755, 0o755, true),
        (2_099_999_999, 0o755, 0o755, false),
    ] {
        set_owner(&parent, owner, mode);
        set_owner(&task, 0, task_mode);
        let judged =
            check_host_paths(&spec, UserRange::DEFAULT_RANGE, &roots, &OwnPaths::default());
        assert_eq!(judged.is_err(), is_kept_out, "{owner} {mode:o} {task_mode:o}: {judged:?}");
    }
    set_owner(&parent, 0, 0o755);
    set_owner(&task, 1001, 0o700);
    let error = check_host_paths(&spec, UserRange::DEFAULT_RANGE, &roots, &OwnPaths::default())
        .unwrap_err()
        .to_string();
    insta::assert_snapshot!(error.replace(task.to_str().unwrap(), "TASK"), @"`TASK` cannot be given to a sandbox: the sandbox's user, one of 2100000000-2100065535, may not read there; let all users read there by its mode");
}

/// R6: An access list is evaluated: a list that grants access to another user lets no sandbox in.
#[test]
fn an_access_list_counts_by_what_it_grants() {
    let root = tempfile::tempdir().unwrap();
    set_owner(root.path(), 0, 0o755);
    let task = root.path().join("task");
    fs::create_dir(&task).unwrap();
    set_owner(&task, 0, 0o700);
    let judged = |user: u32, permissions: u16| {
        // The owner, a user, the owner's group, the mask, all others.
        let entries = [
            (1, 7, u32::MAX),
            (2, permissions, user),
            (4, 0, u32::MAX),
            (16, 7, u32::MAX),
            (32, 0, u32::MAX),
        ];
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            list.extend([u16::to_le_bytes(tag), u16::to_le_bytes(permissions)].concat());
            list.extend(u32::to_le_bytes(id));
        }
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&task, "system.posix_acl_access", &list, flags).unwrap();
        [MountAccess::ReadOnly, MountAccess::ReadWrite]
            .map(|access| judge_access(&task, root.path(), access).is_ok())
    };
    assert_eq!(judged(1001, 7), [true, true]);
    assert_eq!(judged(1001, 5), [true, false]);
    assert_eq!(judged(1002, 7), [false, false]);
    assert_eq!(judged(1001, 0), [false, false]);

    // A list must not let a sandbox replace a directory on the way.
    let inner = task.join("inner");
    fs::create_dir(&inner).unwrap();
    let replaced = |user| {
        judged(user, 7);
        check_path(&inner, root.path()).is_err_and(|why| why.contains("turn it elsewhere"))
    };
    assert!(replaced(1001) && !replaced(1002));
}

fn set_owner(path: &Path, owner: u32, mode: u32) {
    chown(path, Some(owner), Some(owner)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}
