//! The removal of files that git ignores from a workspace that is retained. Such files are builds, caches and
//! dependencies, which can be made again.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tokio::task::spawn_blocking;

use crate::base::dir_tree;
use crate::relay::delivery::outbox::WorkspaceRow;
use crate::relay::repo::ArtifactDir;
use crate::relay::repo::extract_commands::ExtractCommand;
use crate::runner::branch_delivery::extractor::WorkExtractor;

/// Removes the ignored files from a workspace that only this run uses. If git cannot list the ignored files, keeps and
/// logs them.
pub(super) async fn remove_ignored(
    extractor: &WorkExtractor,
    place: &ArtifactDir,
    (desk, command): (&WorkspaceRow, &ExtractCommand),
) {
    if !desk.is_exclusive() {
        return;
    }
    let removed = async {
        // The command runs in a repository of the relay, so that git uses none of the settings in the workspace.
        let start = desk.plan.state.start;
        let listed = extractor.capture_output_with_head(place, command, Some(start)).await?;
        let workspace = desk.workspace.clone();
        let remove = move || {
            ignored_paths(&listed).try_for_each(|name| dir_tree::remove_below(&workspace, name))
        };
        anyhow::Ok(spawn_blocking(remove).await??)
    };
    if let Err(error) = removed.await {
        tracing::warn!(relay = desk.id, "what git ignores is kept, too: {error:#}");
    }
}

/// Parses git's list of ignored paths, which are separated by zero bytes. Skips every path below `.git`: git lists no
/// such path itself, but the agent could have tricked git.
fn ignored_paths(listed: &[u8]) -> impl Iterator<Item = &Path> {
    let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| Path::new(OsStr::from_bytes(name))).filter(|name| !name.starts_with(".git"))
}
