//! The files of a gateway's container: what it reads is copied into the run's directory, what it writes is where the
//! operator wants it.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::Settings;
use crate::base::secret::Secret;
use crate::config::Config;
use crate::observe::access_log::Destination;
use crate::runner::directory::Directory;
use crate::sandbox::spec::{Access, Mount};

/// What has been written, as the container sees it.
pub(super) struct Given {
    pub(super) env: BTreeMap<String, String>,
    pub(super) mounts: Vec<Mount>,
    /// The audit log on this machine.
    pub(super) audit: PathBuf,
}

/// A directory of files for one reader.
struct Shelf {
    path: PathBuf,
    owner: (u32, u32),
    env: BTreeMap<String, String>,
}

pub(super) fn write(
    settings: &Settings,
    config: &Config,
    directory: &Directory,
) -> anyhow::Result<Given> {
    let owner = directory.proxy_user();
    let path = directory.path().join("proxy");
    fs::create_dir(&path).with_context(|| cannot(&path))?;
    own(&path, owner, 0o700)?;
    chown(directory.socket_dir(), Some(owner.0), Some(owner.1))?;
    let mut shelf = Shelf { path: path.clone(), owner, env: BTreeMap::new() };
    shelf.secret("LITELLM_MASTER_KEY_FILE", &config.upstream.api_key)?;
    if let Some(key) = &config.audit.signing_key {
        shelf.secret("AUDIT_SIGNING_KEY_FILE", key)?;
    }
    shelf.copy("CONFIG", settings.config_file.as_deref())?;
    shelf.copy("PRICES_FILE", config.prices.file.as_deref())?;
    shelf.copy("UPSTREAM_CA_FILE", config.upstream.ca_file.as_deref())?;
    let mut mounts = vec![Mount { source: path, target: SHELF.into(), access: Access::ReadOnly }];
    let audit = config.audit.path.clone().unwrap_or_else(|| directory.path().join("audit.jsonl"));
    let mut log = |name: &str, file: &str, source: &Path| {
        let source = writable(source, owner)?;
        let target = format!("{LOGS}/{file}");
        shelf.env.insert(name.to_owned(), target.clone());
        mounts.push(Mount { source, target: target.into(), access: Access::ReadWrite });
        anyhow::Ok(())
    };
    log("AUDIT_LOG_PATH", "audit.jsonl", &audit)?;
    match &config.access_log {
        Destination::Off => drop(shelf.env.insert("ACCESS_LOG_PATH".to_owned(), "off".to_owned())),
        Destination::File(path) => log("ACCESS_LOG_PATH", "access.log", path)?,
        Destination::Stdout | Destination::Stderr => {
            bail!("`ACCESS_LOG_PATH` has to be a file where the gateway is a container")
        }
    }
    Ok(Given { env: shelf.env, mounts, audit })
}

impl Shelf {
    fn secret(&mut self, name: &str, secret: &Secret) -> anyhow::Result<()> {
        self.put(name, secret.expose().as_bytes())
    }

    fn copy(&mut self, name: &str, file: Option<&Path>) -> anyhow::Result<()> {
        let Some(file) = file else { return Ok(()) };
        let text = fs::read(file)
            .with_context(|| format!("`{name}` is `{}`, which cannot be read", file.display()))?;
        self.put(name, &text)
    }

    fn put(&mut self, name: &str, text: &[u8]) -> anyhow::Result<()> {
        let file = name.to_ascii_lowercase();
        let path = self.path.join(&file);
        fs::write(&path, text).with_context(|| cannot(&path))?;
        own(&path, self.owner, 0o400)?;
        self.env.insert(name.to_owned(), format!("{SHELF}/{file}"));
        Ok(())
    }
}

/// A file that the container may go on with; mounted alone, so that it sees nothing beside it.
fn writable(path: &Path, owner: (u32, u32)) -> anyhow::Result<PathBuf> {
    let open = || {
        File::options().append(true).create(true).mode(0o600).open(path)?;
        chown(path, Some(owner.0), Some(owner.1))?;
        fs::canonicalize(path)
    };
    open().with_context(|| cannot(path))
}

fn own(path: &Path, (uid, gid): (u32, u32), mode: u32) -> anyhow::Result<()> {
    let own = || {
        fs::set_permissions(path, Permissions::from_mode(mode))?;
        chown(path, Some(uid), Some(gid))
    };
    own().with_context(|| cannot(path))
}

fn cannot(path: &Path) -> String {
    format!("`{}` cannot be made for the gateway's container", path.display())
}

/// Where the container finds what it reads, and what it writes: the image has the latter.
const SHELF: &str = "/cogni";
const LOGS: &str = "/var/log/cogni";
