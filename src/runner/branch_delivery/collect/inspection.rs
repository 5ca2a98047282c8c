//! The inspection of a workspace by git: the commits of the run's branch, and other work that the workspace holds.
//!
//! **Invariant:** a collection starts two sandboxes at most. One runs the commands that read the repository. The other
//! runs the commands that read files, and only if there is no commit to deliver, or if the workspace is retained.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tokio::task::spawn_blocking;

use super::is_host_failure;
use crate::base::dir_tree;
use crate::relay::delivery::outbox::WorkspaceRow;
use crate::relay::repo::extract_commands::{
    AnnouncedBranch, ExtractCommandSet, ExtractLimits, RELAY_REPOSITORY_TARGET,
};
use crate::relay::repo::{ArtifactDir, ObjectId};
use crate::runner::branch_delivery::extractor::{OutputTarget, WorkExtractor};
use crate::sandbox::spec::WORKSPACE_TARGET;

/// The content of a workspace.
pub(super) enum WorkspaceContent {
    /// The run's branch has commits. The artifact directory has their bundle and their patches.
    Work {
        announced: AnnouncedBranch,
        /// The reason for keeping the workspace, too, if it is kept.
        rest: Option<String>,
    },
    Nothing,
    /// The workspace holds uncommitted files, or commits on other branches.
    Undeliverable(&'static str),
}

/// The inspection of one workspace.
pub(super) struct WorkspaceInspection<'a> {
    extractor: &'a WorkExtractor,
    row: &'a WorkspaceRow,
    place: &'a ArtifactDir,
    commands: ExtractCommandSet,
    /// The list of ignored files, if it was requested together with the uncommitted files.
    ignored: Option<anyhow::Result<Vec<u8>>>,
}

impl<'a> WorkspaceInspection<'a> {
    pub(super) fn new(
        extractor: &'a WorkExtractor,
        (row, artifacts): (&'a WorkspaceRow, &'a ArtifactDir),
        limits: &ExtractLimits,
    ) -> Self {
        let commands = ExtractCommandSet::new(
            &row.plan.state,
            WORKSPACE_TARGET,
            RELAY_REPOSITORY_TARGET,
            limits,
        );
        Self { extractor, row, place: artifacts, commands, ignored: None }
    }

    /// Looks at the repository, and exports the commits of the run's branch.
    pub(super) async fn inspect(&mut self) -> anyhow::Result<WorkspaceContent> {
        let Self { extractor, place: artifacts, commands, .. } = self;
        let file = |path, limit| artifacts.create_bounded(path, limit).map(OutputTarget::File);
        let bundle = file(artifacts.bundle_path(), commands.bundle.output_bytes)?;
        let patches = file(artifacts.patches_path(), commands.patches.output_bytes)?;
        // The bundle comes before the patches: it alone is delivered, and patches may take all the time that is left.
        let repository = [
            (&commands.facts, OutputTarget::Memory),
            (&commands.head, OutputTarget::Memory),
            (&commands.elsewhere, OutputTarget::Memory),
            (&commands.bundle, bundle),
            (&commands.patches, patches),
        ];
        let results = Box::pin(extractor.run_commands(repository, None)).await?;
        let [facts, head, elsewhere, bundle, patches] = results;
        // The command fails if `HEAD` names no commit. The branch has its commits all the same.
        let head = head.unwrap_or_default();
        let Some(announced) = AnnouncedBranch::parse(&facts?, 0)? else {
            // The branch has no new commits, and there is no bundle. The workspace may still hold other work.
            return if elsewhere?.is_empty() {
                self.inspect_files(&head).await
            } else {
                Ok(WorkspaceContent::Undeliverable(COMMITS_ELSEWHERE_MESSAGE))
            };
        };
        bundle?;
        match patches {
            // A full disk may pass, and then the patches are complete.
            Err(error) if is_host_failure(&error) => return Err(error),
            // The patches are for people and for comparisons, so a failure of git does not count.
            Err(error) => tracing::warn!("cannot export the patches: {error:#}"),
            Ok(_) => (),
        }
        // Uncommitted files beside commits are no reason to retain a workspace, because every build leaves such files.
        let rest = match elsewhere {
            Ok(commit) => (!commit.is_empty()).then(|| COMMITS_ELSEWHERE_MESSAGE.to_owned()),
            Err(error) => Some(format!("{COMMITS_UNKNOWN_MESSAGE}: {error:#}")),
        };
        Ok(WorkspaceContent::Work { announced: announced.with_head(&head), rest })
    }

    /// Looks at the files of a workspace without commits.
    async fn inspect_files(&mut self, head: &[u8]) -> anyhow::Result<WorkspaceContent> {
        let head = ObjectId::parse(head.trim_ascii_end()).unwrap_or(self.row.plan.state.start);
        let files = [&self.commands.uncommitted, &self.commands.ignored]
            .map(|command| (command, OutputTarget::Memory));
        let results = Box::pin(self.extractor.run_commands(files, Some(head))).await?;
        let [uncommitted, ignored] = results;
        self.ignored = Some(ignored);
        Ok(if uncommitted?.is_empty() {
            WorkspaceContent::Nothing
        } else {
            WorkspaceContent::Undeliverable(UNCOMMITTED_MESSAGE)
        })
    }

    /// Removes the ignored files from a workspace that is retained and that only this run uses: builds, caches and
    /// dependencies, which can be made again. If git cannot list the ignored files, keeps and logs them.
    pub(super) async fn remove_ignored_files(&mut self) {
        if !self.row.is_exclusive() {
            return;
        }
        let removed = async {
            let listed = match self.ignored.take() {
                Some(listed) => listed?,
                None => self.list_ignored_files().await?,
            };
            let workspace = self.row.workspace.clone();
            let remove = move || {
                ignored_paths(&listed).try_for_each(|name| dir_tree::remove_below(&workspace, name))
            };
            anyhow::Ok(spawn_blocking(remove).await??)
        };
        if let Err(error) = removed.await {
            tracing::warn!(relay = self.row.id, "what git ignores is kept, too: {error:#}");
        }
    }

    async fn list_ignored_files(&self) -> anyhow::Result<Vec<u8>> {
        let start = self.row.plan.state.start;
        let command = [(&self.commands.ignored, OutputTarget::Memory)];
        let [listed] = Box::pin(self.extractor.run_commands(command, Some(start))).await?;
        listed
    }
}

/// Parses git's list of ignored paths, which are separated by zero bytes. Skips every path below `.git`: git lists no
/// such path itself, but the agent could have tricked git.
fn ignored_paths(listed: &[u8]) -> impl Iterator<Item = &Path> {
    let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| Path::new(OsStr::from_bytes(name))).filter(|name| !name.starts_with(".git"))
}

/// The message for a workspace with commits on other branches than the run's.
const COMMITS_ELSEWHERE_MESSAGE: &str =
    "there are commits that are on other branches than the run's";

/// The beginning of the message for a workspace whose other branches git cannot list.
const COMMITS_UNKNOWN_MESSAGE: &str =
    "it is not known whether there are commits on other branches than the run's";

/// The message for a workspace with files, but without commits.
const UNCOMMITTED_MESSAGE: &str = "nothing was committed, and files are left";
