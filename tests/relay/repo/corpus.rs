//! L3, L4, L5: Tests with hostile workspaces: everything that an agent may leave behind, and the outcome of each case.
//!
//! Every case is a function that makes the workspace, or the output of its sandbox, hostile. One table has all
//! outcomes. In each case, nothing of the agent's is executed, nothing is written outside of the relay's directories,
//! and the work is still there.

mod bundle;
mod content;
mod forged;
mod history;
mod identity;
mod merge;
mod message;
mod object;
mod settings;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use cogni_gateway::relay::repo::extract_commands::{AnnouncedBranch, ExtractOutputError};
use cogni_gateway::relay::repo::{ReviewVerdict, ReviewedWork};

use super::setup::{RelayRun, RelaySetup};
use crate::support::repository::TestRepository;

/// One hostile agent with its repository.
pub(crate) struct HostileCase {
    pub(crate) place: RelaySetup,
    pub(crate) run: RelayRun,
}

/// The name of a case, and the function that acts as the agent. The function returns what the sandbox announces.
type HostileAttack = (&'static str, fn(&HostileCase) -> AnnouncementClaim);

/// The driver's result of parsing the announcement.
type AnnouncementClaim = Result<Option<AnnouncedBranch>, ExtractOutputError>;

impl HostileCase {
    fn new(seed: &TestRepository) -> Self {
        let mut setup = RelaySetup::copy_of(seed);
        // The limits are small, so that a test can exceed them.
        let config = &mut setup.config;
        (config.quarantine.commits, config.extract.commits) = (10, 10);
        (config.quarantine.bytes, config.quarantine.memory_bytes) = (8 << 20, 256 << 20);
        (config.policy.hold_files, config.policy.review_file_bytes) = (1000, 1 << 20);
        let run = setup.begin("case", "workspace");
        fs::create_dir(setup.path("canary")).unwrap();
        fs::write(setup.path("outside"), "untouched").unwrap();
        Self { place: setup, run }
    }

    pub(crate) fn agent(&self) -> &TestRepository {
        &self.run.workspace
    }

    /// A command that leaves a trace if it is executed.
    pub(crate) fn canary(&self) -> String {
        format!("touch {}/sung", self.place.path("canary").display())
    }

    /// Extracts the work as an honest driver does.
    pub(crate) fn extract(&self) -> AnnouncementClaim {
        self.place.extract(&self.run)
    }

    /// Returns the outcome as one line.
    fn outcome(&self, claim: AnnouncementClaim) -> String {
        let announced = match claim {
            Ok(Some(announced)) => announced,
            Ok(None) => return "nothing to relay".to_owned(),
            Err(unclear) => return format!("unclear: {unclear}"),
        };
        match self.place.judge(&self.run, announced) {
            Ok(judged) => self.carried_out(judged),
            Err(error) => {
                let text =
                    error.to_string().replace(&self.place.path("").display().to_string(), "");
                format!("refused: {}", text.lines().next().unwrap_or_default())
            }
        }
    }

    fn carried_out(&self, judged: ReviewedWork) -> String {
        let reasons: Vec<_> = judged.verdict().reasons().iter().map(ToString::to_string).collect();
        let outcome =
            format!("{}; {}", judged.work().patch_comparison().as_str(), reasons.join(", "));
        let verdict = judged.verdict().as_str();
        match judged.verdict() {
            ReviewVerdict::Hold(_) => assert!(judged.into_approved().is_err()),
            ReviewVerdict::Push | ReviewVerdict::Review(_) => {
                let pushed = judged.into_approved().unwrap().push_branch(None).unwrap();
                assert_eq!(self.place.tip("sandbox/case"), pushed.tip.to_string());
                self.place.remote.git(["fsck", "--strict", "--no-dangling"]);
                self.assert_commits_name_the_run();
            }
        }
        format!("{verdict}: {}", outcome.trim_end_matches([';', ' ']))
    }

    /// Asserts that pushed commits name their real committer and run, whatever the agent claims.
    fn assert_commits_name_the_run(&self) {
        let start = format!("^{}", self.run.state.start);
        let log = |format| self.place.remote.git(["log", format, "sandbox/case", &start, "^main"]);
        let made = log("--format=%cn <%ce>");
        assert!(made.lines().all(|by| by == "Relay <relay@example.com>"), "{made}");
        // Git may or may not treat the agent's text above these lines as the end of the message.
        let message = log("--format=%B");
        let trailers = message.lines().filter(|line| *line == "Sandbox-Run: run-1").count();
        assert_eq!(trailers, made.lines().count(), "{message}");
    }

    /// Asserts what holds for every outcome.
    fn assert_harmless(&self, name: &str) {
        let sung = fs::read_dir(self.place.path("canary")).unwrap().count();
        assert_eq!(sung, 0, "{name}: something of the agent's was executed");
        assert_eq!(fs::read_to_string(self.place.path("outside")).unwrap(), "untouched", "{name}");
        let mut here: Vec<_> = fs::read_dir(self.place.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        here.sort();
        let known = ["canary", "outside", "remote.git", "state", "workspace"];
        here.retain(|name| !known.contains(&name.as_str()));
        assert_eq!(here, ["workspace.artifacts"], "{name}: something was written elsewhere");
        let base = self.run.state.base_tip.to_string();
        assert_eq!(self.place.tip("main"), base, "{name}: another branch was moved");
    }

    /// Returns the files that other runs of this repository could read.
    fn mirrored(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.place.path("state").join("mirrors")];
        let mut files = vec![];
        while let Some(directory) = folders.pop() {
            for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
                let is_folder = entry.file_type().unwrap().is_dir();
                if is_folder { &mut folders } else { &mut files }.push(entry.path());
            }
        }
        files.sort();
        files
    }
}

/// L3, L4, L5: Each hostile case has the outcome in the table.
#[test]
fn no_hostile_work_escapes_or_executes_or_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let seed = TestRepository::seeded(&directory.path().join("seed.git"));
    let later = merge::moved_on(&directory.path().join("later.git"));
    let lists = [
        (&seed, message::ATTACKS),
        (&seed, content::ATTACKS),
        (&seed, history::ATTACKS),
        (&later, merge::ATTACKS),
        (&seed, identity::ATTACKS),
        (&seed, object::ATTACKS),
        (&seed, forged::ATTACKS),
        (&seed, bundle::ATTACKS),
        (&seed, settings::ATTACKS),
    ];
    let attacks =
        lists.iter().flat_map(|(seed, list)| list.iter().map(move |attack| (seed, attack)));
    let attacks: Vec<_> = attacks.collect();
    let (next, lines) = (Mutex::new(attacks.iter().enumerate()), Mutex::new(vec![]));
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some((at, (seed, (name, attack)))) = next.lock().unwrap().next() else {
                        return;
                    };
                    let case = HostileCase::new(seed);
                    let before = case.mirrored();
                    let claim = attack(&case);
                    let line = format!("{name:<34} {}", case.outcome(claim.clone()));
                    case.assert_harmless(name);
                    assert_eq!(case.mirrored(), before, "{name}: it is in the mirror");
                    let is_kept = case.run.artifacts.bundle_path().exists();
                    assert!(!matches!(claim, Ok(Some(_))) || is_kept, "{name}: the work is lost");
                    lines.lock().unwrap().push((at, line));
                }
            });
        }
    });
    let mut lines = lines.into_inner().unwrap();
    lines.sort();
    let table: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
    // The table for a person who runs the suite.
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("relay.txt");
    fs::write(dir, table.join("\n") + "\n").unwrap();
    insta::with_settings!({filters => vec![("[0-9a-f]{40}", "[name]")]}, {
        insta::assert_snapshot!(table.join("\n"));
    });
}

/// Each case mostly waits for some thirty processes.
const WORKERS: usize = 4;
