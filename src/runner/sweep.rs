//! What crashed processes have left behind: found by the owner that everything of ours carries, and taken away.
//!
//! **Invariant:** nothing is touched whose owner may still live.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context;

use super::directory::owner_of;
use crate::sandbox::docker::{self, Docker};
use crate::sandbox::owner::State;
use crate::sandbox::{Owner, name_of};

/// One thing that carries our mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub kind: Kind,
    pub name: String,
    pub state: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Container,
    Directory,
}

/// What is done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Its owner is alive.
    InUse,
    /// Nobody can tell whose it is, so it is kept.
    Unclear,
    /// Its owner is dead.
    Orphaned,
    /// Its owner is dead, and it is gone.
    Removed,
    /// Its owner is dead, and it is still there.
    Stuck(String),
}

/// Looks at all containers and run directories of ours; with `apply`, removes those whose owner is dead.
///
/// # Errors
/// The engine or the directory cannot be read.
pub async fn sweep(socket: &Path, run_dir: &Path, apply: bool) -> anyhow::Result<Vec<Found>> {
    let docker = Docker::connect(socket).await?;
    let mut found = vec![];
    for container in docker.ours().await? {
        let mut state = fate(owner_of_container(&container));
        if apply && state == Fate::Orphaned {
            state = removed(docker.remove(&container.id).await);
        }
        found.push(Found { kind: Kind::Container, name: container.name, state });
    }
    // After them: a container's socket is not taken away while it runs.
    for name in directories(run_dir)? {
        let mut state = fate(owner_of(&name));
        if apply && state == Fate::Orphaned {
            state = removed(fs::remove_dir_all(run_dir.join(&name)));
        }
        found.push(Found { kind: Kind::Directory, name, state });
    }
    Ok(found)
}

/// A label can be set by anybody; a container of ours also has the name that goes with its run.
fn owner_of_container(container: &docker::Found) -> Option<Owner> {
    (container.name == name_of(&container.run)).then(|| Owner::parse(&container.owner))?
}

fn fate(owner: Option<Owner>) -> Fate {
    match owner.map(|owner| owner.state()) {
        Some(State::Alive) => Fate::InUse,
        Some(State::Dead) => Fate::Orphaned,
        Some(State::Unknown) | None => Fate::Unclear,
    }
}

fn removed<E: Into<anyhow::Error>>(removed: Result<(), E>) -> Fate {
    match removed {
        Ok(()) => Fate::Removed,
        Err(error) => Fate::Stuck(format!("{:#}", error.into())),
    }
}

/// None where there is no such directory: nothing has run here yet.
fn directories(run_dir: &Path) -> anyhow::Result<Vec<String>> {
    let cannot = || format!("cannot read `{}`", run_dir.display());
    let entries = match fs::read_dir(run_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error).with_context(cannot),
    };
    let mut names = vec![];
    for entry in entries {
        names.push(entry.with_context(cannot)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}
