//! The mark of a run's directory that a container may use. A process that cannot ask the engine knows from the mark
//! whether it may remove the directory of a dead run.

use std::fs;
use std::io;
use std::path::Path;

/// Marks the run's directory that holds a sandbox's directory. `run_dir` is the parent of the runs' directories. The mark
/// precedes the container: the engine may create the container although this process ends before the engine's answer.
///
/// # Errors
/// Returns an error if the mark cannot be written.
pub(super) fn write_above(directory: &Path, run_dir: &Path) -> io::Result<()> {
    // The sandbox of a long-running agent or of an extractor has a directory below the run's directory.
    let name = directory.strip_prefix(run_dir).ok().and_then(|path| path.iter().next());
    write(&name.map_or_else(|| directory.to_owned(), |name| run_dir.join(name)))
}

/// Marks the directory of a run.
///
/// # Errors
/// Returns an error if the mark cannot be written.
pub fn write(run_directory: &Path) -> io::Result<()> {
    fs::write(run_directory.join(FILE_NAME), "")
}

/// Returns true if a container may use the run's directory.
pub fn exists(run_directory: &Path) -> bool {
    run_directory.join(FILE_NAME).exists()
}

/// The embedded driver has its own file names in the directory: `container`, `root`.
const FILE_NAME: &str = "engine-container";

#[cfg(test)]
mod tests {
    use super::*;

    /// R5: the sandboxes of one run share one mark, also those with a directory below the run's directory.
    #[test]
    fn a_sandbox_below_the_runs_directory_marks_the_runs_directory() {
        let run_dir = tempfile::tempdir().expect("made");
        let run_directory = run_dir.path().join("cogni-1");
        let directory = run_directory.join("made");
        fs::create_dir_all(&directory).expect("made");
        assert!(!exists(&run_directory));
        write_above(&directory, run_dir.path()).expect("written");
        assert!(exists(&run_directory) && !exists(&directory));
    }
}
