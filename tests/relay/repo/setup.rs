//! A remote, this machine's relay, and runs whose sandbox is a plain directory.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::repo::extract_commands::{self, AnnouncedBranch, ExtractCommandSet};
use cogni_gateway::relay::repo::mirror::{CommitAuthor, FileOwner};
use cogni_gateway::relay::repo::quarantine::CommitProvenance;
use cogni_gateway::relay::repo::review::RelayConfig;
use cogni_gateway::relay::repo::{
    ArtifactDir, BranchKey, BranchLease, BranchState, ExtractedWork, GitProgram, PushOutcome,
    RepoError, RepoMirror, ReviewedWork,
};
use tempfile::TempDir;

use crate::support::repository::TestRepository;

/// Everything that a run needs except the agent.
pub(crate) struct RelaySetup {
    pub(crate) directory: TempDir,
    pub(crate) remote: TestRepository,
    pub(crate) mirror: RepoMirror,
    pub(crate) config: RelayConfig,
}

/// A run, while the agent works or afterwards.
pub(crate) struct RelayRun {
    pub(crate) lease: BranchLease,
    pub(crate) state: BranchState,
    pub(crate) workspace: TestRepository,
    pub(crate) artifacts: ArtifactDir,
}

impl RelaySetup {
    /// Makes a remote with one commit on `main`, on this disk.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let remote = TestRepository::seeded(&directory.path().join("remote.git"));
        let url = remote.path.display().to_string();
        Self::at(directory, remote, &url)
    }

    /// Makes a remote that is a copy of `seed`.
    pub(crate) fn copy_of(seed: &TestRepository) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("remote.git");
        copy_dir(&seed.path, &path);
        let url = path.display().to_string();
        Self::at(directory, TestRepository::at(&path), &url)
    }

    /// Uses this remote by another address.
    pub(crate) fn at(directory: TempDir, remote: TestRepository, url: &str) -> Self {
        let state = directory.path().join("state");
        let git = GitProgram::find(&state.join("home")).unwrap();
        let mirror = RepoMirror::open(&git, &state, &url.parse().unwrap()).unwrap();
        Self { directory, remote, mirror, config: RelayConfig::default() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Begins a run: reads its branch's state and fills its workspace.
    pub(crate) fn begin(&self, key: &str, name: &str) -> RelayRun {
        let lease = self.mirror.lease_branch(&BranchKey::parse(key).unwrap()).unwrap();
        let state = self.mirror.ensure_branch(&lease, None, None).unwrap();
        self.begin_with(lease, state, name)
    }

    pub(crate) fn begin_with(
        &self,
        lease: BranchLease,
        state: BranchState,
        name: &str,
    ) -> RelayRun {
        let workspace = self.path(name);
        let own = self.directory.path().metadata().unwrap();
        // The user who runs the tests is the agent's user here.
        let (uid, gid) = (own.uid(), own.gid());
        let author = CommitAuthor { name: "An Agent".into(), email: "agent@example.com".into() };
        self.mirror
            .checkout_workspace(&lease, &state, &workspace, (FileOwner { uid, gid }, &author))
            .unwrap();
        let artifacts = ArtifactDir::create(&self.path(&format!("{name}.artifacts"))).unwrap();
        RelayRun { lease, state, workspace: TestRepository::at(&workspace), artifacts }
    }

    /// Extracts the agent's commits; `None` if there are none.
    pub(crate) fn extract(
        &self,
        run: &RelayRun,
    ) -> Result<Option<AnnouncedBranch>, extract_commands::ExtractOutputError> {
        let announced = self.extract_without_patches(run)?;
        if announced.is_some() {
            take_output(&self.commands(run).patches, &run.artifacts, run.artifacts.patches_path());
        }
        Ok(announced)
    }

    pub(crate) fn extract_without_patches(
        &self,
        run: &RelayRun,
    ) -> Result<Option<AnnouncedBranch>, extract_commands::ExtractOutputError> {
        let commands = self.commands(run);
        let (facts, exit_code) = execute_command(&commands.facts);
        let Some(announced) = AnnouncedBranch::parse(&facts, exit_code)? else { return Ok(None) };
        let announced = announced.with_head(&execute_command(&commands.head).0);
        take_output(&commands.bundle, &run.artifacts, run.artifacts.bundle_path());
        Ok(Some(announced))
    }

    pub(crate) fn commands(&self, run: &RelayRun) -> ExtractCommandSet {
        let workspace = run.workspace.path.display().to_string();
        let own = self.path("own.git").display().to_string();
        ExtractCommandSet::new(&run.state, &workspace, &own, &self.config.extract)
    }

    /// Reviews the extracted work.
    pub(crate) fn judge(
        &self,
        run: &RelayRun,
        announced: AnnouncedBranch,
    ) -> Result<ReviewedWork, RepoError> {
        self.judge_beside(&[], run, announced)
    }

    /// Reviews the work on a host that has some credentials.
    pub(crate) fn judge_beside(
        &self,
        known: &[SecretString],
        run: &RelayRun,
        announced: AnnouncedBranch,
    ) -> Result<ReviewedWork, RepoError> {
        let work = ExtractedWork {
            mirror: &self.mirror,
            lease: &run.lease,
            state: run.state.clone(),
            announced,
            artifacts: &run.artifacts,
        };
        work.into_quarantine(&self.config.quarantine, &commit_provenance())?
            .review(&self.config.policy, known)
    }

    /// Delivers work that the review accepts.
    pub(crate) fn deliver(&self, run: &RelayRun) -> Result<PushOutcome, RepoError> {
        let announced = self.extract(run).unwrap().expect("the agent has committed something");
        self.judge(run, announced)?.into_approved().expect("the work is not held").push_branch(None)
    }

    /// Returns the commit of a branch of the remote; empty if there is no such branch.
    pub(crate) fn tip(&self, branch: &str) -> String {
        let path = self.remote.path.join("refs/heads").join(branch);
        fs::read_to_string(path).unwrap_or_default().trim_end().to_owned()
    }
}

pub(crate) fn commit_provenance() -> CommitProvenance {
    CommitProvenance {
        committer: "Relay <relay@example.com>".to_owned(),
        run: "run-1".to_owned(),
        agent: Some("sandbox:agent".to_owned()),
    }
}

fn take_output(command: &extract_commands::ExtractCommand, artifacts: &ArtifactDir, path: PathBuf) {
    let mut spool = artifacts.create_bounded(path, command.output_bytes).unwrap();
    // Overlong output is truncated silently, as a sandbox's is.
    let _ = spool.push(&execute_command(command).0);
    spool.finish().unwrap();
}

/// Executes a command of the extraction without a sandbox, with its environment on top of a container's. Returns its
/// output, truncated at the limit.
pub(crate) fn execute_command(command: &extract_commands::ExtractCommand) -> (Vec<u8>, i64) {
    let mut child = Command::new(&command.argv[0])
        .args(&command.argv[1..])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .envs(command.env.iter().map(|(name, value)| (name, value)))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut output = vec![];
    let mut stdout = child.stdout.take().unwrap().take(command.output_bytes + 1);
    stdout.read_to_end(&mut output).unwrap();
    if output.len() as u64 > command.output_bytes {
        child.kill().unwrap();
    }
    (output, child.wait().unwrap().code().unwrap_or(-1).into())
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}
