//! L2: Tests of an agent's workspace before the agent starts.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use cogni_gateway::relay::repo::mirror::{CommitAuthor, FileOwner, MAX_CHECKOUT_NAMES};
use cogni_gateway::relay::repo::{BranchKey, FetchLimits, RepoError, ReviewVerdict};

use super::setup::{RelayRun, RelaySetup};
use crate::support::repository::TestRepository;

const AGENT: FileOwner = FileOwner { uid: 1001, gid: 1001 };

fn fill_workspace(setup: &RelaySetup, run: &RelayRun, path: &Path) -> Result<(), RepoError> {
    let author = CommitAuthor { name: "An Agent".into(), email: "agent@example.com".into() };
    setup.mirror.checkout_workspace(&run.lease, &run.state, path, (AGENT, &author))
}

/// L2: All files belong to the agent, links stay links, and their targets are not touched.
#[test]
fn the_workspace_is_the_agents_and_nothing_else_is() {
    let setup = RelaySetup::new();
    let work = TestRepository::with_files(&setup.path("work"));
    work.git(["pull", "-q", setup.remote.path.to_str().unwrap(), "main"]);
    let target = setup.path("target");
    fs::write(&target, "not the agent's").unwrap();
    symlink(&target, work.path.join("link")).unwrap();
    work.commit("A link");
    work.git(["push", "-q", setup.remote.path.to_str().unwrap(), "main"]);
    let run = setup.begin("owned", "first");
    let path = setup.path("owned");
    fill_workspace(&setup, &run, &path).unwrap();
    let mut folders = vec![path.clone()];
    while let Some(directory) = folders.pop() {
        assert_eq!(directory.symlink_metadata().unwrap().uid(), 1001, "{}", directory.display());
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let found = entry.path().symlink_metadata().unwrap();
            assert_eq!((found.uid(), found.gid()), (1001, 1001), "{}", entry.path().display());
            folders.extend(found.is_dir().then(|| entry.path()));
        }
    }
    assert!(path.join("link").is_symlink());
    assert_eq!(target.metadata().unwrap().uid(), setup.directory.path().metadata().unwrap().uid());
    // A workspace that belongs to the agent is not filled again.
    let again = fill_workspace(&setup, &run, &path).unwrap_err();
    assert!(matches!(again, RepoError::StateUnusable { .. }), "{again}");
}

/// L2: A directory that is not empty, or that another user owns, is not filled.
#[test]
fn a_directory_that_is_not_empty_and_owned_is_not_filled() {
    let setup = RelaySetup::new();
    let run = setup.begin("other", "first");
    let full = setup.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join(".git"), "gitdir: /elsewhere").unwrap();
    let elsewhere = setup.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let link = setup.path("link");
    symlink(&elsewhere, &link).unwrap();
    for path in [full, link] {
        let error = fill_workspace(&setup, &run, &path).unwrap_err();
        assert!(matches!(error, RepoError::StateUnusable { .. }), "{error}");
    }
    let empty = setup.path("empty");
    fs::create_dir(&empty).unwrap();
    fill_workspace(&setup, &run, &empty).unwrap();
    assert_eq!(empty.metadata().unwrap().permissions().mode() & 0o777, 0o700);
}

/// L2: The agent has the base branch in its workspace, and commits that it merges from there do not count as its own
/// work.
#[test]
fn a_newer_base_may_be_merged_and_is_not_the_agents_work() {
    let setup = RelaySetup::new();
    let run = setup.begin("behind", "first");
    run.workspace.write("own.txt", "own\n");
    run.workspace.commit("Own");
    setup.deliver(&run).unwrap();
    drop(run);
    let work = TestRepository::with_files(&setup.path("work"));
    let url = setup.remote.path.display().to_string();
    work.git(["pull", "-q", &url, "main"]);
    work.write(".github/workflows/ci.yml", "on: push\n");
    work.commit("A workflow");
    work.git(["push", "-q", &url, "main"]);
    let run = setup.begin("behind", "second");
    assert!(run.state.exists && run.state.start != run.state.base_tip);
    run.workspace.git(["merge", "-q", "--no-edit", "origin/main"]);
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!((pushed.verdict, pushed.commits), (ReviewVerdict::Push, 2));
}

/// L2, L6: A base that has moved into a conflict does not affect the push; the branch has what was made from the old
/// base. A person, or a later run, finds the conflict when merging.
#[test]
fn a_base_that_moved_into_a_conflict_does_not_affect_the_push() {
    let setup = RelaySetup::new();
    let run = setup.begin("conflict", "first");
    run.workspace.write("docs/guide.md", "the agent's\n");
    run.workspace.commit("Agent's guide");
    let work = TestRepository::with_files(&setup.path("work"));
    let url = setup.remote.path.display().to_string();
    work.git(["pull", "-q", &url, "main"]);
    work.write("docs/guide.md", "of another run\n");
    let other_commit = work.commit("Another guide");
    work.git(["push", "-q", &url, "main"]);
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!(setup.tip("sandbox/conflict"), pushed.tip.to_string());
    assert_eq!(setup.tip("main"), other_commit);
    drop(run);

    let run = setup.begin("conflict", "second");
    assert_eq!(
        (run.state.start, run.state.base_tip.to_string()),
        (pushed.tip, other_commit.clone())
    );
    let merged = run.workspace.try_git(["merge", "-q", "origin/main"], b"");
    assert!(!merged.status.success(), "there is no conflict: {merged:?}");
    run.workspace.write("docs/guide.md", "both\n");
    run.workspace.commit("Both guides");
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!((pushed.mode.as_str(), setup.tip("main")), ("bundled: merge", other_commit));
    assert_eq!(setup.remote.git(["show", "sandbox/conflict:docs/guide.md"]), "both");
}

/// L2: A sweep packs a mirror with many objects and drops branches that no run uses any more. Used branches work as
/// before, and so does a run that returns to a dropped one.
#[test]
fn a_sweep_packs_mirrors_and_drops_unused_branches() {
    let setup = RelaySetup::new();
    let day = Duration::from_hours(24);
    let before = std::time::SystemTime::now() - day;
    drop((setup.begin("old", "first"), setup.begin("new", "second")));
    let state = setup.path("state");
    let only = |path: &Path| {
        let found = |path: &Path| path.extension().is_none_or(|ending| ending == "git");
        fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| found(path))
            .unwrap()
    };
    let mirror = TestRepository::at(&only(&state.join("mirrors")));
    for at in 0..25 {
        let name = mirror.git_with(["hash-object", "-w", "--stdin"], &[at]);
        mirror.git_with(["pack-objects", "-q", "objects/pack/pack"], name.as_bytes());
    }
    mirror.git(["update-ref", "refs/notes/relay/old", "refs/relay/old/base"]);
    let lease = only(&state.join("branches")).join("old/lease");
    fs::File::options().append(true).open(lease).unwrap().set_modified(before - day).unwrap();
    let url = setup.remote.path.display().to_string();
    let swept = |repositories: &[_]| {
        cogni_gateway::relay::repo::mirror::remove_unused_mirrors(&state, before, repositories)
            .unwrap()
    };
    let refs = || mirror.git(["for-each-ref", "--format=%(refname)"]);
    assert_eq!(swept(&[url.parse().unwrap()]), 0);
    assert_eq!(refs(), "refs/notes/relay/old\nrefs/relay/new/base\nrefs/relay/old/base");
    assert_eq!(swept(&[]), 0);
    assert_eq!(refs(), "refs/relay/new/base");
    let counted = mirror.git(["count-objects", "-v"]);
    let packs = counted.lines().find_map(|line| line.strip_prefix("packs: ")).unwrap();
    assert!(packs.parse::<u32>().unwrap() <= 2, "{counted}");
    let run = setup.begin("old", "third");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    assert_eq!(setup.deliver(&run).unwrap().commits, 1);
}

/// L2: A mirror is made once, also by two runs at the same time, and serves runs on several branches concurrently.
#[test]
fn runs_at_several_branches_work_at_once() {
    let place = RelaySetup::new();
    std::thread::scope(|scope| {
        for at in 0..4 {
            let place = &place;
            scope.spawn(move || {
                let run = place.begin(&format!("key-{at}"), &format!("run-{at}"));
                run.workspace.write(&format!("{at}.txt"), "work\n");
                run.workspace.commit("Work");
                let pushed = place.deliver(&run).unwrap();
                assert_eq!(place.tip(&format!("sandbox/key-{at}")), pushed.tip.to_string());
            });
        }
    });
}

/// L2: A repository's owner decides how much a fetch brings. No more than the limit is written, and nothing remains.
#[test]
fn a_repository_that_brings_too_much_is_not_fetched() {
    let setup = RelaySetup::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let noise: String = (0..1 << 20)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            char::from(b'!' + u8::try_from(state >> 57).unwrap() % 90)
        })
        .collect();
    let work = TestRepository::with_files(&setup.path("work"));
    work.git(["pull", "-q", setup.remote.path.to_str().unwrap(), "main"]);
    work.write("noise", &noise);
    work.commit("Noise");
    work.git(["push", "-q", setup.remote.path.to_str().unwrap(), "main"]);
    let lease = setup.mirror.lease_branch(&BranchKey::parse("large").unwrap()).unwrap();
    let limits = FetchLimits { pack_bytes: 256 << 10, ..FetchLimits::default() };
    let small = setup.mirror.clone().with_limits(limits);
    let refused = small.ensure_branch(&lease, None, None).unwrap_err();
    assert!(matches!(refused, RepoError::FetchLimitExceeded { .. }), "{refused}");
    assert!(refused.to_string().contains("raise `[fetch]`"), "{refused}");
    let begun = setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let workspace = setup.path("large");
    let author = CommitAuthor { name: "An Agent".into(), email: "agent@example.com".into() };
    let refused =
        small.checkout_workspace(&lease, &begun, &workspace, (AGENT, &author)).unwrap_err();
    assert!(matches!(&refused, RepoError::Git(error) if error.is_resource_limit()), "{refused}");
    assert!(!workspace.join("noise").exists());
}

/// L2, R5: A git that is killed may leave the locks of its refs. They stop no later run at the branch.
#[test]
fn locks_that_a_killed_fetch_leaves_stop_no_run() {
    let setup = RelaySetup::new();
    let lease = setup.mirror.lease_branch(&BranchKey::parse("locked").unwrap()).unwrap();
    let found =
        fs::read_dir(setup.path("state/mirrors")).unwrap().map(|entry| entry.unwrap().path());
    let mirror = found.into_iter().find(|path| path.extension().unwrap() == "git").unwrap();
    let refs = mirror.join("refs/relay/locked");
    fs::create_dir_all(&refs).unwrap();
    for name in ["base.lock", "branch.lock"] {
        fs::write(refs.join(name), "").unwrap();
    }
    setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let names = fs::read_dir(&refs).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.collect::<Vec<_>>(), ["base"]);
}

/// L2: A git that is killed leaves the files that it was writing. They are removed, unless another fetch is under way.
#[test]
fn what_a_killed_fetch_leaves_is_removed() {
    let setup = RelaySetup::new();
    let lease = setup.mirror.lease_branch(&BranchKey::parse("left").unwrap()).unwrap();
    setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let found =
        fs::read_dir(setup.path("state/mirrors")).unwrap().map(|entry| entry.unwrap().path());
    let mirror = found.into_iter().find(|path| path.extension().unwrap() == "git").unwrap();
    let names = ["pack/tmp_pack_aBc1", "pack/.tmp-7-pack-1.idx", "ab/tmp_obj_x"];
    let left = names.map(|name| mirror.join("objects").join(name));
    let write_leftovers = || {
        for path in &left {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "unfinished").unwrap();
        }
    };
    let is_left = || left.iter().any(|path| path.exists());
    write_leftovers();
    // While another fetch is under way, the files may belong to it.
    let other = fs::File::create(mirror.with_extension("fetch")).unwrap();
    other.lock_shared().unwrap();
    setup.mirror.ensure_branch(&lease, None, None).unwrap();
    assert!(left.iter().all(|path| path.exists()));
    drop(other);
    setup.mirror.ensure_branch(&lease, None, None).unwrap();
    assert!(!is_left());
    write_leftovers();
    let before = std::time::SystemTime::UNIX_EPOCH;
    let state = setup.path("state");
    cogni_gateway::relay::repo::mirror::remove_unused_mirrors(&state, before, &[]).unwrap();
    assert!(!is_left());
    // A fetch waits a limited time for a process that packs the mirror.
    let packs = fs::File::create(mirror.with_extension("fetch")).unwrap();
    packs.lock().unwrap();
    let limits = FetchLimits { time: Duration::from_secs(2), ..FetchLimits::default() };
    let hasty = setup.mirror.clone().with_limits(limits);
    let refused = hasty.ensure_branch(&lease, None, None).unwrap_err();
    assert!(refused.to_string().contains("2s"), "{refused}");
}

/// L2: A repository whose branches are replaced fills a mirror with objects that no branch leads to. A full mirror is
/// packed by the next sweep, and takes no fetch before.
#[test]
fn a_mirror_that_is_full_takes_no_more() {
    let setup = RelaySetup::new();
    let lease = setup.mirror.lease_branch(&BranchKey::parse("full").unwrap()).unwrap();
    setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let directory = setup.path("state");
    let found = fs::read_dir(directory.join("mirrors")).unwrap().map(|entry| entry.unwrap().path());
    let mirror = found.into_iter().find(|path| path.extension().unwrap() == "git").unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u8::try_from(state >> 56).unwrap()
    });
    let garbage: Vec<_> = noise.take(4 << 20).collect();
    TestRepository::at(&mirror).git_with(["hash-object", "-w", "--stdin"], &garbage);
    let limits = FetchLimits { mirror_bytes: 2 << 20, ..FetchLimits::default() };
    let small = setup.mirror.clone().with_limits(limits);
    let refused = small.ensure_branch(&lease, None, None).unwrap_err();
    assert!(matches!(refused, RepoError::FetchLimitExceeded { .. }), "{refused}");
    assert!(refused.to_string().contains("relay sweep"), "{refused}");
    let before = std::time::SystemTime::UNIX_EPOCH;
    cogni_gateway::relay::repo::mirror::remove_unused_mirrors(&directory, before, &[]).unwrap();
    small.ensure_branch(&lease, None, None).unwrap();
}

/// L2: Ten files and four levels of ten names each are a hundred thousand files. The repository is refused before any
/// of them is written.
#[test]
fn a_repository_that_is_larger_than_it_looks_is_refused_before_it_is_checked_out() {
    let setup = RelaySetup::new();
    let blobs: Vec<_> = (0..10).map(|n| setup.remote.object("blob", n.to_string())).collect();
    let directory = |mode, inside: &[String]| {
        let names: Vec<_> = (0..10).map(|n| n.to_string()).collect();
        let entries = names.iter().zip(inside.iter().cycle());
        let entries: Vec<_> =
            entries.map(|(name, object)| (mode, name.as_bytes(), &**object)).collect();
        setup.remote.tree(&entries)
    };
    let mut tree = directory("100644", &blobs);
    for _ in 0..4 {
        tree = directory("40000", &[tree]);
    }
    let commit = setup.remote.git(["commit-tree", &tree, "-m", "A bomb"]);
    setup.remote.git(["update-ref", "refs/heads/main", &commit]);
    let lease = setup.mirror.lease_branch(&BranchKey::parse("bomb").unwrap()).unwrap();
    let state = setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let refused = setup.mirror.measure_checkout(&state, 400 << 20).unwrap_err();
    assert!(matches!(refused, RepoError::CheckoutTooLarge { .. }), "{refused}");
    // A hundred thousand files and eleven thousand directories, of one block each.
    setup.mirror.measure_checkout(&state, 111_110 * 4096).unwrap();
    let refused = setup.mirror.measure_checkout(&state, 111_110 * 4096 - 1).unwrap_err();
    assert!(refused.to_string().contains("455106560 bytes, of 455106559"), "{refused}");
    // One more level exceeds the limit of names, whatever the free space.
    tree = directory("40000", &[tree]);
    let commit = setup.remote.git(["commit-tree", &tree, "-m", "A larger bomb"]);
    setup.remote.git(["update-ref", "refs/heads/main", &commit]);
    let state = setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let refused = setup.mirror.measure_checkout(&state, u64::MAX).unwrap_err();
    assert!(
        refused.to_string().contains(&format!("more than {MAX_CHECKOUT_NAMES} names")),
        "{refused}"
    );
}

/// L2: A branch with a name that no file system can have fails with what to do about it.
#[test]
fn a_branch_that_cannot_be_written_says_what_to_do() {
    let setup = RelaySetup::new();
    let blob = setup.remote.object("blob", "x");
    let tree = setup.remote.tree(&[("100644", &[b'a'; 300], &blob)]);
    let commit = setup.remote.git(["commit-tree", &tree, "-m", "A long name"]);
    setup.remote.git(["update-ref", "refs/heads/main", &commit]);
    let lease = setup.mirror.lease_branch(&BranchKey::parse("long").unwrap()).unwrap();
    let state = setup.mirror.ensure_branch(&lease, None, None).unwrap();
    let author = CommitAuthor { name: "An Agent".into(), email: "agent@example.com".into() };
    let made =
        setup.mirror.checkout_workspace(&lease, &state, &setup.path("long"), (AGENT, &author));
    let error = made.unwrap_err().to_string().replace(&"a".repeat(300), "[name]");
    insta::with_settings!({filters => vec![("[0-9a-f]{40}", "[commit]")]}, {
        insta::assert_snapshot!(error);
    });
}
