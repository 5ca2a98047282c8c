//! L2, R5, R6: Tests of directory trees that an agent leaves: they are measured, removed and given to another user,
//! whatever their shape.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::thread;

use cogni_gateway::base::dir_tree;
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use rustix::process::{getegid, geteuid};

use crate::support::allocations;

/// R5: An agent can make directories deeper than a stack allows, so the removal must not use recursion.
#[test]
fn a_directory_of_any_depth_is_removed() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().join("top");
    fs::create_dir(&top).unwrap();
    make_levels(&top, 3000);
    // A larger stack would need a hundred times as many levels to fail.
    let small = thread::Builder::new().stack_size(128 << 10);
    let of = top.clone();
    let walk = move || {
        (dir_tree::disk_usage(&of, u64::MAX - 1).unwrap(), dir_tree::remove_tree(&of).unwrap())
    };
    let (measured, ()) = small.spawn(walk).unwrap().join().unwrap();
    assert_eq!(measured, u64::MAX, "it is deeper than a path can say");
    assert!(!top.exists());
}

/// R5: If the measurement held whole paths, a long path with many names below it would use up the service's memory.
#[test]
fn a_directory_of_any_width_is_measured_in_little_memory() {
    let place = tempfile::tempdir().unwrap();
    let mut here = openat(CWD, place.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
    let (name, levels, wide) = ("x".repeat(255), 15, 4_000);
    for _ in 0..levels {
        mkdirat(&here, name.as_str(), Mode::RWXU).unwrap();
        here = openat(&here, name.as_str(), OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    for number in 0..wide {
        mkdirat(&here, number.to_string().as_str(), Mode::RWXU).unwrap();
    }
    let mut measured = 0;
    let peak = allocations::peak_bytes(|| {
        measured = dir_tree::disk_usage(place.path(), u64::MAX - 1).unwrap();
    });
    assert!(peak < 512 << 10, "{peak} bytes");
    // No name is missing, and none is counted twice.
    let (names, table) = ((levels + wide) * 4096, 4 << 20);
    assert!((names..names + table).contains(&measured), "{measured} bytes for {names}");
}

/// R6: Targets of links are not removed, and a missing tree is no error.
#[test]
fn a_tree_is_removed_and_nothing_beside_it() {
    let place = tempfile::tempdir().unwrap();
    let (top, outside) = (place.path().join("top"), place.path().join("outside"));
    fs::create_dir_all(top.join("deep/er/est")).unwrap();
    fs::create_dir_all(top.join("shut/inside")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "").unwrap();
    for number in 0..3000 {
        fs::write(top.join("deep/er").join(number.to_string()), "").unwrap();
    }
    symlink(&outside, top.join("link")).unwrap();
    symlink(&outside, top.join("deep/er/link")).unwrap();
    fs::set_permissions(top.join("shut"), fs::Permissions::from_mode(0o000)).unwrap();
    dir_tree::remove_tree(&top).unwrap();
    assert!(!top.exists() && outside.join("file").exists());
    dir_tree::remove_tree(&top).unwrap();

    let link = place.path().join("link");
    symlink(&outside, &link).unwrap();
    dir_tree::remove_tree(&link).unwrap();
    assert!(!link.is_symlink() && outside.join("file").exists());
}

/// R6: The space on disk counts, whatever size a file claims, and each name counts.
#[test]
fn a_tree_is_measured_by_its_space_on_disk() {
    let place = tempfile::tempdir().unwrap();
    let measure = |most| dir_tree::disk_usage(place.path(), most).unwrap();
    assert_eq!(measure(u64::MAX), 0);
    fs::create_dir(place.path().join("folder")).unwrap();
    fs::write(place.path().join("folder/one"), vec![7; 100_000]).unwrap();
    let is_one = |bytes| (100_000..120_000).contains(&bytes);
    assert!(is_one(measure(u64::MAX)), "{}", measure(u64::MAX));
    let hollow = fs::File::create(place.path().join("hollow")).unwrap();
    hollow.set_len(1 << 40).unwrap();
    symlink("/", place.path().join("link")).unwrap();
    assert!(is_one(measure(u64::MAX)), "{}", measure(u64::MAX));

    for number in 0..100 {
        fs::write(place.path().join(number.to_string()), "").unwrap();
    }
    assert!(measure(u64::MAX) >= 500_000, "{}", measure(u64::MAX));
    assert!((200_000..300_000).contains(&measure(200_000)));
    assert!(
        dir_tree::disk_usage(Path::new("/nowhere"), 1).unwrap_err().kind()
            == io::ErrorKind::NotFound
    );
}

/// L2: An agent's commits of any depth can be given to the next user by a process with few descriptors left.
#[test]
fn a_directory_of_any_depth_is_given_away() {
    if let Some(top) = env::var_os(GIVEN) {
        let (uid, gid) = other_user();
        return dir_tree::chown_tree(Path::new(&top), uid, gid).unwrap();
    }
    let place = tempfile::tempdir().unwrap();
    let (top, outside) = (place.path().join("top"), place.path().join("outside"));
    fs::create_dir(&top).unwrap();
    fs::write(&outside, "").unwrap();
    symlink(&outside, top.join("link")).unwrap();
    make_levels(&top, 1500);
    let mut child = Command::new("sh");
    child.args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""]).arg(env::current_exe().unwrap());
    child.args(["--exact", "dir_tree::a_directory_of_any_depth_is_given_away"]).env(GIVEN, &top);
    let ended = child.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));

    let owner = |path: &Path| {
        let found = fs::symlink_metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    let deepest = top.join("a/".repeat(1500));
    for path in [&top, &top.join("link"), &deepest] {
        assert_eq!(owner(path), other_user(), "{}", path.display());
    }
    assert_eq!(owner(&outside), owner(place.path()));
}

/// Returns a user to give files to: another user if this process is root, else its own.
fn other_user() -> (u32, u32) {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    if uid == 0 { (12_345, 12_345) } else { (uid, gid) }
}

const GIVEN: &str = "COGNI_TEST_GIVES_AWAY";

fn make_levels(top: &Path, levels: usize) {
    let open = |folder: &rustix::fd::OwnedFd| openat(folder, "a", OFlags::DIRECTORY, Mode::empty());
    let mut here = openat(CWD, top, OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&here, "a", Mode::RWXU).unwrap();
        here = open(&here).unwrap();
    }
}

/// R6: Removing a path that another user has chosen stays below the directory and follows no link.
#[test]
fn a_name_below_a_directory_is_removed_through_no_link() {
    let place = tempfile::tempdir().unwrap();
    let (top, outside) = (place.path().join("top"), place.path().join("outside"));
    fs::create_dir_all(top.join("a/b")).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "").unwrap();
    fs::write(top.join("a/b/file"), "").unwrap();
    symlink(&outside, top.join("link")).unwrap();
    let remove = |name: &str| dir_tree::remove_below(&top, Path::new(name));
    for name in ["link/file", "../outside", "a/../../outside/file", "/etc/hostname", "..", ""] {
        assert!(remove(name).is_err(), "{name}");
    }
    assert!(outside.join("file").exists());
    remove("a/b/").unwrap();
    remove("link").unwrap();
    remove("a/gone").unwrap();
    assert!(outside.join("file").exists() && !top.join("a/b").exists());
    assert!(!top.join("link").is_symlink() && top.join("a").exists());
}
