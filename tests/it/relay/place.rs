//! A remote, this machine's relay, and runs whose sandbox is a directory.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cogni_gateway::relay::extract::{self, Announced, Commands};
use cogni_gateway::relay::judge::Config;
use cogni_gateway::relay::mirror::{Author, Owner};
use cogni_gateway::relay::quarantine::Provenance;
use cogni_gateway::relay::{
    Artifacts, BranchKey, BranchState, Error, Git, Judged, Lease, Mirror, Pushed, Remote, Work,
};
use tempfile::TempDir;

use crate::support::repository::Repository;

/// Everything but the agent.
pub(crate) struct Place {
    pub(crate) directory: TempDir,
    pub(crate) remote: Repository,
    pub(crate) mirror: Mirror,
    pub(crate) config: Config,
}

/// A run, while the agent is at work or after it.
pub(crate) struct Run {
    pub(crate) lease: Lease,
    pub(crate) state: BranchState,
    pub(crate) workspace: Repository,
    pub(crate) artifacts: Artifacts,
}

impl Place {
    /// A remote with one commit on `main`, on this disk.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let remote = Repository::seeded(&directory.path().join("remote.git"));
        let url = remote.path.display().to_string();
        Self::at(directory, remote, &url)
    }

    /// The same, where the relay reaches the remote by another address.
    pub(crate) fn at(directory: TempDir, remote: Repository, url: &str) -> Self {
        let state = directory.path().join("state");
        let git = Git::find(&state.join("home")).unwrap();
        let mirror = Mirror::open(&git, &state, &Remote::parse(url).unwrap()).unwrap();
        Self { directory, remote, mirror, config: Config::default() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Begins a run: its branch is looked up, and its workspace filled.
    pub(crate) fn begin(&self, key: &str, name: &str) -> Run {
        let lease = self.mirror.lease(&BranchKey::parse(key).unwrap()).unwrap();
        let state = self.mirror.ensure_branch(&lease, None, None).unwrap();
        self.begin_with(lease, state, name)
    }

    pub(crate) fn begin_with(&self, lease: Lease, state: BranchState, name: &str) -> Run {
        let workspace = self.path(name);
        let own = self.directory.path().metadata().unwrap();
        // Whoever runs the tests, who is to commit in there.
        let (uid, gid) = (own.uid(), own.gid());
        let author = Author { name: "An Agent".into(), email: "agent@example.com".into() };
        self.mirror.feed(&lease, &state, &workspace, (Owner { uid, gid }, &author)).unwrap();
        let artifacts = Artifacts::create(&self.path(&format!("{name}.artifacts"))).unwrap();
        Run { lease, state, workspace: Repository::at(&workspace), artifacts }
    }

    /// The agent is done: what it made is taken out; `None` where it committed nothing.
    pub(crate) fn extract(&self, run: &Run) -> Option<Announced> {
        let workspace = run.workspace.path.display().to_string();
        let commands = Commands::new(&run.state, &workspace, &self.config.extract);
        let announced = Announced::parse(&execute(&commands.facts)).unwrap()?;
        let announced = announced.with_head(&execute(&commands.head));
        for (command, path) in [
            (&commands.patches, run.artifacts.patches()),
            (&commands.bundle, run.artifacts.bundle()),
        ] {
            let mut spool = run.artifacts.spool(path, command.output_bytes).unwrap();
            spool.push(&execute(command)).unwrap();
            spool.finish().unwrap();
        }
        Some(announced)
    }

    /// From what came out to the verdict.
    pub(crate) fn judge(&self, run: &Run, announced: Announced) -> Result<Judged, Error> {
        let work = Work {
            mirror: &self.mirror,
            lease: &run.lease,
            state: run.state.clone(),
            announced,
            artifacts: &run.artifacts,
        };
        work.judge(&self.config, &provenance(), &[])
    }

    /// The whole way, for work that is welcome.
    pub(crate) fn deliver(&self, run: &Run) -> Result<Pushed, Error> {
        let announced = self.extract(run).expect("the agent has committed something");
        self.judge(run, announced)?.cleared().expect("the work is not held").push(None)
    }

    /// Where a branch of the remote stands.
    pub(crate) fn tip(&self, branch: &str) -> String {
        self.remote.git(["rev-parse", &format!("refs/heads/{branch}")])
    }
}

pub(crate) fn provenance() -> Provenance {
    Provenance {
        committer: "Relay <relay@example.com>".to_owned(),
        run: "run-1".to_owned(),
        agent: Some("sandbox:agent".to_owned()),
    }
}

/// What a sandbox would be asked to do, as it is: the words, and the words' environment over that of a container.
pub(crate) fn execute(command: &extract::Command) -> Vec<u8> {
    // A sandbox's standard error is for people.
    let output = Command::new(&command.argv[0])
        .args(&command.argv[1..])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .envs(command.env.iter().copied())
        .current_dir(Path::new("/"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    output.stdout
}
