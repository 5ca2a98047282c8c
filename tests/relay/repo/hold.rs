//! L5: Tests of held work: it is kept, and one command applies it.

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::repo::quarantine::QuarantineError;
use cogni_gateway::relay::repo::review::{
    FoundSecrets, PathPattern, RelayConfig, ReviewAction, ScanWindow, SecretScanner,
};
use cogni_gateway::relay::repo::{RepoError, ReviewVerdict};

use super::setup::RelaySetup;
use crate::support::repository::{TestRepository, command_in};

/// L5: The printed command applies the work in a clone of the repository.
#[test]
fn held_work_is_applied_by_one_line() {
    let setup = RelaySetup::new();
    let run = setup.begin("held", "it's one");
    run.workspace.write(".github/workflows/ci.yml", "on: push\n");
    let tip = run.workspace.commit("A workflow");
    let announced = setup.extract(&run).unwrap().unwrap();
    let held = setup.judge(&run, announced).unwrap().into_approved().unwrap_err();
    assert_eq!(setup.tip("sandbox/held"), "");
    let line = run.artifacts.apply_command(&held.state.branch, "0123456789abcdef");
    let shown = line.replace(setup.directory.path().to_str().unwrap(), "");
    insta::assert_snapshot!(
        shown,
        @r"git -c fetch.fsckObjects=true fetch '/it'\''s one.artifacts/bundle' 'refs/heads/sandbox/held:refs/heads/held/held-89abcdef'"
    );
    let clone = setup.path("clone");
    let url = setup.remote.path.display().to_string();
    TestRepository::at(setup.directory.path()).git(["clone", "-q", &url, clone.to_str().unwrap()]);
    let applied = command_in("sh", &clone).args(["-c", &line]).status().unwrap();
    assert!(applied.success());
    assert_eq!(TestRepository::at(&clone).git(["rev-parse", "held/held-89abcdef"]), tip);
}

/// L5: The shipped rules file states every rule, and equals the built-in rules.
#[test]
fn the_shipped_rules_equal_the_built_in_rules() {
    let file = std::fs::read_to_string("config/relay.toml").unwrap();
    let default = RelayConfig::default();
    assert_eq!(RelayConfig::parse(&file).unwrap(), default);
    assert_eq!(
        default.extract,
        cogni_gateway::relay::repo::extract_commands::ExtractLimits::default()
    );
    assert_eq!(
        default.quarantine,
        cogni_gateway::relay::repo::quarantine::QuarantineLimits::default()
    );
    let own =
        RelayConfig::parse("[policy]\nnew_program = \"push\"\n[extract]\ncommits = 5\n").unwrap();
    assert_eq!((own.policy.new_program, own.extract.commits), (ReviewAction::Push, 5));
    assert_eq!(own.policy.paths, default.policy.paths);
    for wrong in [
        "[policy]\nnew_progam = \"push\"",
        "[policy]\nsecret = \"maybe\"",
        "[[policy.secrets]]\nname = \"x\"\npattern = \"(\"",
    ] {
        assert!(RelayConfig::parse(wrong).is_err(), "{wrong}");
    }
}

/// L5: An operator's own rules replace the built-in ones.
#[test]
fn an_operators_rules_decide() {
    let mut setup = RelaySetup::new();
    setup.config = RelayConfig::parse(
        "[[policy.paths]]\nwhy = \"it is ours\"\nverdict = \"hold\"\nmatch = [\"docs/**\"]\n",
    )
    .unwrap();
    let run = setup.begin("rules", "one");
    run.workspace.write("docs/more.md", "more\n");
    run.workspace.write(".vscode/tasks.json", "{}\n");
    run.workspace.commit("Docs");
    let announced = setup.extract(&run).unwrap().unwrap();
    let judged = setup.judge(&run, announced).unwrap();
    let reasons: Vec<_> = judged.verdict().reasons().iter().map(ToString::to_string).collect();
    assert_eq!(
        (judged.verdict().as_str(), reasons),
        ("hold", vec!["`docs/more.md`: it is ours".to_owned()])
    );
}

/// L5: A credential of this host is found anywhere in a file, also across the border of two pieces.
#[test]
fn a_credential_of_this_host_is_found_anywhere() {
    let setup = RelaySetup::new();
    let run = setup.begin("leak", "one");
    let secret = "correct-horse-battery-staple";
    for at in [0, 16_370, 65_500] {
        let name = format!("{at}.bin");
        run.workspace.write(&name, [vec![b'.'; at], secret.into(), vec![b'.'; 40_000]].concat());
    }
    run.workspace.commit("Leaks");
    let announced = setup.extract(&run).unwrap().unwrap();
    let judged = setup.judge_beside(&[SecretString::new(secret)], &run, announced).unwrap();
    let ReviewVerdict::Hold(reasons) = judged.verdict() else { panic!("{:?}", judged.verdict()) };
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    assert!(!format!("{reasons:?}").contains(secret));
}

/// L5: A credential as long as a private key is found at every split, also in two-byte letters.
#[test]
fn a_long_credential_is_found_at_every_split() {
    let secret = "correct-horse-".repeat(120);
    let scanner = SecretScanner::new(&[], &[SecretString::new(&secret)]).unwrap();
    let is_found = |pieces: &[&[u8]]| {
        let (mut text, mut found) = (ScanWindow::default(), FoundSecrets::new());
        for piece in pieces {
            scanner.scan(&mut text, piece, &mut found);
        }
        found.len() == 1
    };
    let plain = format!("before {secret} after").into_bytes();
    let wide: Vec<_> = plain.iter().flat_map(|byte| [*byte, 0]).collect();
    for text in [plain, wide] {
        for split in 0..=text.len() {
            assert!(is_found(&[&text[..split], &text[split..]]), "{split} of {}", text.len());
        }
        assert!(is_found(&text.chunks(100).collect::<Vec<_>>()));
        assert!(!is_found(&[&text[..text.len() / 2]]));
    }
}

/// L5: A credential that was in the repository before is not attributed to the agent.
#[test]
fn a_credential_that_was_there_is_not_found_again() {
    let setup = RelaySetup::new();
    let work = TestRepository::with_files(&setup.path("work"));
    let url = setup.remote.path.display().to_string();
    work.git(["pull", "-q", &url, "main"]);
    let token = format!("token = \"ghp_{}\"\n", "a1B2c3D4e5F6".repeat(3));
    work.write("conf.txt", &token);
    work.commit("A token of long ago");
    work.git(["push", "-q", &url, "main"]);
    let run = setup.begin("old", "one");
    run.workspace.write("conf.txt", token.clone() + "more = 1\n");
    run.workspace.commit("More");
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!(pushed.verdict, ReviewVerdict::Push);
}

/// L4: A change of a few bytes in a large file brings the whole file. If git reaches a limit with it, the work is
/// refused as too costly.
#[test]
fn work_that_takes_too_much_room_is_too_costly() {
    let mut setup = RelaySetup::new();
    let work = TestRepository::with_files(&setup.path("work"));
    let url = setup.remote.path.display().to_string();
    work.git(["pull", "-q", &url, "main"]);
    let noise = (0..500_000_u32).flat_map(|at| at.wrapping_mul(0x9e37_79b1).to_le_bytes());
    let mut noise: Vec<u8> = noise.collect();
    work.write("noise.bin", &noise);
    work.commit("A large file");
    work.git(["push", "-q", &url, "main"]);
    setup.config.quarantine.pack_bytes = 100 << 10;
    let run = setup.begin("large", "one");
    noise.extend(b"more");
    run.workspace.write("noise.bin", &noise);
    run.workspace.commit("A little more");
    let announced = setup.extract(&run).unwrap().unwrap();
    assert!(run.artifacts.bundle_path().metadata().unwrap().len() < 10_000);
    let error = setup.judge(&run, announced).unwrap_err();
    assert!(
        matches!(error, RepoError::QuarantineRefused(QuarantineError::LimitExceeded(_))),
        "{error:?}"
    );
    insta::assert_snapshot!(error, @"cannot accept the agent's work: it takes more time or memory than the limits allow: `git index-pack` has failed (signal: 25 (SIGXFSZ))");
}

/// L5: `*` and `**` match as documented.
#[test]
fn patterns_match_whole_paths() {
    let matches = |pattern: &str, path: &str| PathPattern::new(pattern).matches(path.as_bytes());
    for (pattern, path) in [
        ("**/requirements*.txt", "a/requirements-dev.txt"),
        ("**/*.gradle.kts", "build.gradle.kts"),
        (".*/**", ".a/b"),
        ("a/**/b", "a/b"),
        ("a/**/b", "a/x/y/b"),
        ("**", "any/thing"),
        ("x*y*z", "xayyz"),
        ("package.json", "PAC\u{212a}AGE.j\u{17f}on"),
        ("Stra\u{df}e", "STRASSE"),
        (".github/**", ".git\u{200b}hub/x"),
    ] {
        assert!(matches(pattern, path), "{pattern} {path}");
    }
    for (pattern, path) in [
        ("AGENTS.md", "docs/AGENTS.md"),
        (".*/**", "a/.b/c"),
        ("way", "wa\u{301}y"),
        ("a/*", "a/b/c"),
        ("a/**/b", "a/b/c"),
        ("x*y", "xyz"),
        ("ab*ba", "aba"),
        ("", "a"),
    ] {
        assert!(!matches(pattern, path), "{pattern} {path}");
    }
}

/// L4, L6: A thousand commits stay a thousand commits.
#[test]
fn a_thousand_commits_arrive() {
    let setup = RelaySetup::new();
    let run = setup.begin("long", "one");
    let commit = |at: usize| {
        let from = if at == 0 { "from refs/heads/sandbox/long^0\n" } else { "" };
        format!(
            "commit refs/heads/sandbox/long\ncommitter A <a@example.com> {at} +0100\ndata 5\n{at:<5}\n{from}\
             M 100644 inline counter\ndata 5\n{at:<5}\n"
        )
    };
    let stream: String = (0..1000).map(commit).collect();
    run.workspace.git_with(["fast-import", "--quiet"], stream.as_bytes());
    let pushed = setup.deliver(&run).unwrap();
    assert_eq!((pushed.commits, pushed.mode.as_str()), (1000, "replayed"));
    assert_eq!(setup.remote.git(["rev-list", "--count", "main..sandbox/long"]), "1000");
}
