//! What git ignores in a workspace that is kept: builds, caches and dependencies, which nobody misses.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use tokio::task::spawn_blocking;

use crate::base::dir_tree;
use crate::relay::delivery::outbox::WorkspaceRow;
use crate::relay::repo::ArtifactDir;
use crate::relay::repo::extract_commands::ExtractCommand;
use crate::runner::branch_delivery::extractor::WorkExtractor;

/// Removes what is ignored from a workspace that is the run's alone. Where that cannot be told, all of it is kept.
pub(super) async fn remove_ignored(
    extractor: &WorkExtractor,
    place: &ArtifactDir,
    (desk, command): (&WorkspaceRow, &ExtractCommand),
) {
    if !desk.is_exclusive() {
        return;
    }
    let removed = async {
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

/// Git lists nothing of its own directory; whatever it says, that stays.
fn ignored_paths(listed: &[u8]) -> impl Iterator<Item = &Path> {
    let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| Path::new(OsStr::from_bytes(name))).filter(|name| !name.starts_with(".git"))
}
