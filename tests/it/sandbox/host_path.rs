//! R3, R6: of this machine a sandbox sees what the operator allows, and that is what it seems to be.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use cogni_gateway::sandbox::RunSpec;
use cogni_gateway::sandbox::host_path::check;
use cogni_gateway::sandbox::spec::{Access, Workspace};

fn judge(path: &Path, root: &Path) -> Result<(), String> {
    let workspace = Workspace::Directory { path: path.into(), access: Access::ReadOnly };
    let spec = RunSpec { workspace, ..super::spec() };
    check(&spec, &[root.to_owned()]).map_err(|error| error.to_string())
}

#[test]
fn a_directory_below_a_root_is_let_in() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("task")).unwrap();
    judge(&root.path().join("task"), root.path()).unwrap();
    judge(root.path(), root.path()).unwrap();
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
        judge(&path, root.path()).expect_err(&path.display().to_string());
    }
}

/// R3: not even where the operator allows everything.
#[test]
fn what_no_sandbox_may_see_is_kept_out_below_every_root() {
    for path in ["/", "/var", "/run", "/etc/ssl", "/proc/self", "/dev/shm", "/sys"] {
        judge(Path::new(path), Path::new("/")).expect_err(path);
    }
}
