//! The container that serves a run's gateway beside its sandbox, in the words of Docker Engine.
//!
//! **Invariant:** no secret stands in it, whose every word `docker inspect` shows: secrets are files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, RestartPolicy, RestartPolicyNameEnum,
};

use super::{bind, digest, labels};
use crate::sandbox::spec::{Access, Mount, SOCKET_DIR, Stamp};

/// What is asked of it. It has a network and the upstream's key; the sandbox has neither, but the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    pub run: String,
    /// By name or id.
    pub image: String,
    /// A network of the engine's, `bridge` or `host`.
    pub network: String,
    /// Who it runs as: whoever owns what is mounted.
    pub uid: u32,
    pub gid: u32,
    pub env: BTreeMap<String, String>,
    /// The directory of the run's socket on this machine. It is made in there, so that can be written.
    pub socket_dir: PathBuf,
    pub mounts: Vec<Mount>,
}

/// What Docker Engine is asked to create, of an image that it has.
pub fn create_body(proxy: &Proxy, image: &str, stamp: &Stamp) -> ContainerCreateBody {
    let mut body = ContainerCreateBody {
        image: Some(image.to_owned()),
        cmd: Some(vec!["proxy".to_owned()]),
        env: Some(proxy.env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
        user: Some(format!("{}:{}", proxy.uid, proxy.gid)),
        stop_signal: Some("SIGTERM".to_owned()),
        host_config: Some(host_config(proxy)),
        ..ContainerCreateBody::default()
    };
    let digest = digest(&body);
    body.labels = Some(labels(&proxy.run, stamp, digest));
    body
}

fn host_config(proxy: &Proxy) -> HostConfig {
    let socket = Mount {
        source: proxy.socket_dir.clone(),
        target: SOCKET_DIR.into(),
        access: Access::ReadWrite,
    };
    HostConfig {
        network_mode: Some(proxy.network.clone()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        mounts: Some(std::iter::once(&socket).chain(&proxy.mounts).map(bind).collect()),
        pids_limit: Some(PIDS),
        memory: Some(MEMORY),
        memory_swap: Some(MEMORY),
        // What it says is read when it ends before its time, and is gone with it.
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".to_owned()),
            config: Some([("max-size".to_owned(), "1m".to_owned())].into()),
        }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        ..HostConfig::default()
    }
}

/// As `docker/compose.yaml` has them.
const PIDS: i64 = 64;
const MEMORY: i64 = 128 << 20;
