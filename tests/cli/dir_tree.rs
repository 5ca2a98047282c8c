//! L2, R5, R6: what an agent leaves in a directory is measured, taken away and given away, whatever it looks like.

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

/// R5: an agent makes directories faster than a stack grows; who goes down by recursion ends there, with the service.
#[test]
fn a_directory_of_any_depth_is_removed() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().join("top");
    fs::create_dir(&top).unwrap();
    dig(&top, 3000);
    // What would take a hundred times as many levels with a usual stack.
    let small = thread::Builder::new().stack_size(128 << 10);
    let of = top.clone();
    let walk = move || {
        (dir_tree::disk_usage(&of, u64::MAX - 1).unwrap(), dir_tree::remove_tree(&of).unwrap())
    };
    let (measured, ()) = small.spawn(walk).unwrap().join().unwrap();
    assert_eq!(measured, u64::MAX, "it is deeper than a path can say");
    assert!(!top.exists());
}

/// R5: where a path is long, an agent has its whole length for each name below it, if whoever measures holds paths; and
/// the memory is the service's.
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
    let peak =
        allocations::peak(|| measured = dir_tree::disk_usage(place.path(), u64::MAX - 1).unwrap());
    assert!(peak < 512 << 10, "{peak} bytes");
    // None is left out, and none comes twice.
    let (names, table) = ((levels + wide) * 4096, 4 << 20);
    assert!((names..names + table).contains(&measured), "{measured} bytes for {names}");
}

/// R6: nothing that a link leads to, and nothing that is not there.
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

/// R6: what is on the disk counts, whatever size a file says that it has, and each name.
#[test]
fn a_tree_is_measured_by_what_it_takes() {
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

/// L2: what an agent has committed, however deep, is given to the next one by a process that has few descriptors left.
#[test]
fn a_directory_of_any_depth_is_given_away() {
    if let Some(top) = env::var_os(GIVEN) {
        let (uid, gid) = someone();
        return dir_tree::chown_tree(Path::new(&top), uid, gid).unwrap();
    }
    let place = tempfile::tempdir().unwrap();
    let (top, outside) = (place.path().join("top"), place.path().join("outside"));
    fs::create_dir(&top).unwrap();
    fs::write(&outside, "").unwrap();
    symlink(&outside, top.join("link")).unwrap();
    dig(&top, 1500);
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
        assert_eq!(owner(path), someone(), "{}", path.display());
    }
    assert_eq!(owner(&outside), owner(place.path()));
}

/// Whom we may give files to: anybody, or nobody but us.
fn someone() -> (u32, u32) {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    if uid == 0 { (12_345, 12_345) } else { (uid, gid) }
}

const GIVEN: &str = "COGNI_TEST_GIVES_AWAY";

fn dig(top: &Path, levels: usize) {
    let open = |folder: &rustix::fd::OwnedFd| openat(folder, "a", OFlags::DIRECTORY, Mode::empty());
    let mut here = openat(CWD, top, OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..levels {
        mkdirat(&here, "a", Mode::RWXU).unwrap();
        here = open(&here).unwrap();
    }
}

/// R6: what is removed by a name that somebody else has chosen is below the directory, and no link leads out of it.
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
