//! L3, L4, L5: what a hostile agent may have left in its workspace, and what becomes of each.
//!
//! Every case is a function that makes the workspace, or what comes out of it, as bad as it can. One table says how each
//! ends. Whatever the end: nothing of the agent's is executed, nothing is written outside of what is the relay's, and
//! the work is still there.

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

use super::setup::{Place, Run};
use crate::support::repository::Repository;

/// One hostile agent, and its place.
pub(crate) struct Case {
    pub(crate) place: Place,
    pub(crate) run: Run,
}

/// Its name, and what it does. It returns what its sandbox announces.
type Attack = (&'static str, fn(&Case) -> Claim);

/// What a driver has understood.
type Claim = Result<Option<AnnouncedBranch>, ExtractOutputError>;

impl Case {
    fn new(seed: &Repository) -> Self {
        let mut place = Place::copy_of(seed);
        // Small enough that a test can be too large.
        let config = &mut place.config;
        (config.quarantine.commits, config.extract.commits) = (10, 10);
        (config.quarantine.bytes, config.quarantine.memory_bytes) = (8 << 20, 256 << 20);
        (config.policy.hold_files, config.policy.review_file_bytes) = (1000, 1 << 20);
        let run = place.begin("case", "workspace");
        fs::create_dir(place.path("canary")).unwrap();
        fs::write(place.path("outside"), "untouched").unwrap();
        Self { place, run }
    }

    pub(crate) fn agent(&self) -> &Repository {
        &self.run.workspace
    }

    /// A command that shows that it was executed.
    pub(crate) fn canary(&self) -> String {
        format!("touch {}/sung", self.place.path("canary").display())
    }

    /// What an honest driver takes out.
    pub(crate) fn extract(&self) -> Claim {
        self.place.extract(&self.run)
    }

    /// How it ends, in a line.
    fn outcome(&self, claim: Claim) -> String {
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
        let said = format!("{}; {}", judged.work().patch_comparison().as_str(), reasons.join(", "));
        let verdict = judged.verdict().as_str();
        match judged.verdict() {
            ReviewVerdict::Hold(_) => assert!(judged.into_approved().is_err()),
            ReviewVerdict::Push | ReviewVerdict::Review(_) => {
                let pushed = judged.into_approved().unwrap().push_branch(None).unwrap();
                assert_eq!(self.place.tip("sandbox/case"), pushed.tip.to_string());
                self.place.remote.git(["fsck", "--strict", "--no-dangling"]);
                self.is_the_relays();
            }
        }
        format!("{verdict}: {}", said.trim_end_matches([';', ' ']))
    }

    /// Whatever an agent says of its commits, those that are pushed say who made them, and of which run they are.
    fn is_the_relays(&self) {
        let start = format!("^{}", self.run.state.start);
        let told = |format| self.place.remote.git(["log", format, "sandbox/case", &start, "^main"]);
        let made = told("--format=%cn <%ce>");
        assert!(made.lines().all(|by| by == "Relay <relay@example.com>"), "{made}");
        // Whether or not git takes what the agent has written above them for the end of a message.
        let said = told("--format=%B");
        let trailers = said.lines().filter(|line| *line == "Sandbox-Run: run-1").count();
        assert_eq!(trailers, made.lines().count(), "{said}");
    }

    /// What holds however it ends.
    fn is_harmless(&self, name: &str) {
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

    /// What other runs at this repository would find.
    fn mirrored(&self) -> Vec<PathBuf> {
        let mut folders = vec![self.place.path("state").join("mirrors")];
        let mut files = vec![];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let is_folder = entry.file_type().unwrap().is_dir();
                if is_folder { &mut folders } else { &mut files }.push(entry.path());
            }
        }
        files.sort();
        files
    }
}

/// L3, L4, L5: each hostile case ends as the table says.
#[test]
fn no_hostile_work_escapes_or_executes_or_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Repository::seeded(&directory.path().join("seed.git"));
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
                    let case = Case::new(seed);
                    let before = case.mirrored();
                    let claim = attack(&case);
                    let line = format!("{name:<34} {}", case.outcome(claim.clone()));
                    case.is_harmless(name);
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
    // For people who run the suite.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("relay.txt");
    fs::write(place, table.join("\n") + "\n").unwrap();
    insta::with_settings!({filters => vec![("[0-9a-f]{40}", "[name]")]}, {
        insta::assert_snapshot!(table.join("\n"));
    });
}

/// Each case waits for some thirty processes, most of the time.
const WORKERS: usize = 4;
