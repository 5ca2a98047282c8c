//! What an engine has of its own that a sandbox is made of: an image, and volumes. Both may bring along what nobody has asked for.

use std::path::Path;

use bollard::models;

use super::{Docker, NOT_FOUND, is_status};
use crate::sandbox::spec::{RunSpec, Volume, WORKSPACE, is_target};
use crate::sandbox::{Error, docker};

impl Docker {
    /// The id of an image of which nothing can be written.
    ///
    /// # Errors
    /// There is no such image, or the engine would give it a disk of its own.
    pub(super) async fn image_for(&self, name: &str, spec: &RunSpec) -> Result<String, Error> {
        let image = self.image(name).await?;
        let places = image.config.and_then(|config| config.volumes).unwrap_or_default();
        match places.into_iter().find(|place| !is_covered(spec, Path::new(place))) {
            Some(place) => {
                let (image, instead) = (name.to_owned(), instead_of(Path::new(&place)));
                Err(Error::ImageVolume { image, place, instead })
            }
            None => docker::id_of(image.id, name),
        }
    }

    /// Looks at volumes before a container is made of them: one that is not there would be made with it, and stay.
    ///
    /// # Errors
    /// One is not there, or is not the engine's own directory.
    pub(super) async fn check_volumes(&self, volumes: &[Volume]) -> Result<(), Error> {
        for Volume { name, .. } in volumes {
            let found = self.client.inspect_volume(name).await.map_err(|source| {
                if is_status(&source, NOT_FOUND) {
                    return Error::NoVolume(name.to_owned());
                }
                Error::Engine { doing: "look at the volume", source }
            })?;
            if let Some(what) = shown_by(&found) {
                return Err(Error::Volume { name: name.clone(), what });
            }
        }
        Ok(())
    }
}

/// Whether something that was asked for stands there in its place.
fn is_covered(spec: &RunSpec, place: &Path) -> bool {
    let mounts = spec.mounts.iter().map(|mount| &mount.target);
    let mut targets = mounts.chain(spec.volumes.iter().map(|volume| &volume.target));
    let has_workspace = spec.workspace_path().is_some();
    targets.any(|target| target == place) || has_workspace && place == Path::new(WORKSPACE)
}

/// What can be asked for there.
fn instead_of(place: &Path) -> &'static str {
    if place == Path::new(WORKSPACE) {
        "give the run a workspace, or "
    } else if is_target(place) {
        "give a mount or a volume there, or "
    } else {
        ""
    }
}

/// What a volume is, if not a directory that the engine has made for it.
fn shown_by(volume: &models::Volume) -> Option<String> {
    if volume.driver != "local" {
        return Some(format!("the driver `{}`", volume.driver));
    }
    let is_device = |name: &&String| name.eq_ignore_ascii_case("device");
    let name = volume.options.keys().find(is_device)?;
    Some(format!("`{}`", volume.options[name]))
}
