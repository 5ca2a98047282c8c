//! The certificate authority of a run's tunnels, and the certificates that it signs: one for each host.
//!
//! The programs of a sandbox trust this authority, and no other machine does. Its certificate names the hosts of the
//! run's tunnels, so that it vouches for no other host even if it stays trusted where it should not.
//!
//! **Invariant:** the keys are in the memory of this process only, in no file, log or record, and end with the run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::ServerConfig;
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::base::tls::http1_server_config;

/// The authority of one run. Its own key signs the certificates of all hosts at the start, and is dropped then.
pub(super) struct TunnelAuthority {
    certificate: String,
    /// The settings of TLS for each host, in small letters.
    servers: BTreeMap<Arc<str>, Arc<ServerConfig>>,
}

/// The reason why an authority cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TunnelAuthorityError {
    #[error("the certificates of the run's tunnels cannot be made")]
    Certificate(#[from] rcgen::Error),
    #[error("the certificates of the run's tunnels cannot be used")]
    Key(#[from] rustls::Error),
}

/// The certificate of one host. A client that asks for another host, or for none, gets no certificate.
struct HostCertificate {
    host: Arc<str>,
    key: Arc<CertifiedKey>,
}

impl TunnelAuthority {
    /// Makes an authority for these hosts, which are names in small letters, and their certificates.
    ///
    /// # Errors
    /// Returns an error if the system has no random bytes, or a host cannot stand in a certificate.
    pub(super) fn new(hosts: &[Arc<str>]) -> Result<Self, TunnelAuthorityError> {
        let key = KeyPair::generate()?;
        let issuer = CertifiedIssuer::self_signed(authority_params(hosts)?, key)?;
        let mut servers = BTreeMap::new();
        for host in hosts {
            let key = Arc::new(sign_host(host, &issuer)?);
            let resolver = Arc::new(HostCertificate { host: Arc::clone(host), key });
            servers.insert(Arc::clone(host), http1_server_config(resolver));
        }
        Ok(Self { certificate: issuer.pem(), servers })
    }

    /// Returns the authority's certificate as PEM. It has no secret.
    pub(super) fn certificate_pem(&self) -> &str {
        &self.certificate
    }

    /// Returns the settings of TLS for a host of the authority.
    pub(super) fn server_config(&self, host: &str) -> Option<Arc<ServerConfig>> {
        self.servers.get(host).cloned()
    }
}

impl ResolvesServerCert for HostCertificate {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let is_own = hello.server_name().is_some_and(|name| name.eq_ignore_ascii_case(&self.host));
        is_own.then(|| Arc::clone(&self.key))
    }
}

impl fmt::Debug for HostCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostCertificate").field("host", &self.host).finish_non_exhaustive()
    }
}

/// Returns the parameters of the authority's certificate. The extensions are those that Python 3.13 demands
/// (`VERIFY_X509_STRICT`), which is the strictest of the clients.
fn authority_params(hosts: &[Arc<str>]) -> Result<CertificateParams, rcgen::Error> {
    let mut params = named_params(vec![], AUTHORITY_NAME)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let names = hosts.iter().map(|host| GeneralSubtree::DnsName(host.to_string()));
    // A kind of name without a permitted subtree is not restricted, so all addresses are excluded.
    let addresses = [CidrSubnet::V4([0; 4], [0; 4]), CidrSubnet::V6([0; 16], [0; 16])];
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: names.collect(),
        excluded_subtrees: addresses.map(GeneralSubtree::IpAddress).into(),
    });
    Ok(params)
}

/// Makes the certificate of a host, and its key.
fn sign_host(
    host: &str,
    issuer: &CertifiedIssuer<'static, KeyPair>,
) -> Result<CertifiedKey, TunnelAuthorityError> {
    let key = KeyPair::generate()?;
    let certificate = host_params(host)?.signed_by(&key, issuer)?;
    let private = PrivatePkcs8KeyDer::from(key.serialize_der());
    let signer = any_ecdsa_type(&private.into())?;
    Ok(CertifiedKey::new(vec![certificate.into()], signer))
}

fn host_params(host: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = named_params(vec![host.to_owned()], HOST_CERTIFICATE_NAME)?;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Returns parameters with a subject and a time of validity.
fn named_params(names: Vec<String>, subject: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, subject);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().min(MAX_CLOCK);
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(CLOCK_TOLERANCE);
    params.not_after = epoch + now + VALIDITY;
    Ok(params)
}

/// The subjects of the certificates, which people see in error messages of clients.
const AUTHORITY_NAME: &str = "Cogni Gateway, authority of one run";
const HOST_CERTIFICATE_NAME: &str = "Cogni Gateway, tunnel of one run";

/// The time before now from which a certificate is valid. A sandbox has its host's clock, which may be set back.
const CLOCK_TOLERANCE: Duration = Duration::from_hours(24);

/// The time for which a certificate is valid: longer than a run, and at most what clients accept (825 days).
const VALIDITY: Duration = Duration::from_hours(24 * 800);

/// The latest time of the clock that a certificate can express with its validity: the year 9890.
const MAX_CLOCK: Duration = Duration::from_secs(250_000_000_000);

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConnection};

    use super::*;

    fn authority(hosts: &[&str]) -> TunnelAuthority {
        let hosts: Vec<Arc<str>> = hosts.iter().map(|host| Arc::from(*host)).collect();
        TunnelAuthority::new(&hosts).unwrap()
    }

    /// Makes a handshake in memory between a client that trusts `trusted` and the server of a host.
    fn shake_hands(
        trusted: &TunnelAuthority,
        server: Arc<ServerConfig>,
        (name, has_sni): (&str, bool),
    ) -> Result<Option<Vec<u8>>, rustls::Error> {
        let mut roots = RootCertStore::empty();
        let pem = trusted.certificate_pem().as_bytes();
        roots.add(CertificateDer::from_pem_slice(pem).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.enable_sni = has_sni;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut server = ServerConnection::new(server).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = vec![];
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut &*bytes).unwrap();
            server.process_new_packets()?;
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut &*bytes).unwrap();
            client.process_new_packets()?;
        }
        Ok(client.alpn_protocol().map(<[u8]>::to_vec))
    }

    #[test]
    fn a_client_that_trusts_the_authority_speaks_http1() {
        let authority = authority(&["api.example.com", "git.example.com"]);
        for host in ["api.example.com", "git.example.com"] {
            let server = authority.server_config(host).unwrap();
            let protocol = shake_hands(&authority, server, (host, true)).unwrap();
            assert_eq!(protocol.unwrap(), b"http/1.1");
        }
        assert!(authority.server_config("other.example.com").is_none());
    }

    /// A client that asks for another host than the tunnel's, or for none, gets no certificate.
    #[test]
    fn another_host_gets_no_certificate() {
        let authority = authority(&["api.example.com", "git.example.com"]);
        let server = || authority.server_config("api.example.com").unwrap();
        assert!(shake_hands(&authority, server(), ("api.example.com", false)).is_err());
        assert!(shake_hands(&authority, server(), ("git.example.com", true)).is_err());
        assert!(shake_hands(&authority, server(), ("API.Example.com", true)).is_ok());
    }

    /// Each run has an authority of its own: the programs of one run do not trust another run's.
    #[test]
    fn another_runs_authority_is_not_trusted() {
        let (one, two) = (authority(&["api.example.com"]), authority(&["api.example.com"]));
        let server = two.server_config("api.example.com").unwrap();
        assert!(shake_hands(&one, server, ("api.example.com", true)).is_err());
    }

    /// Nothing that the authority shows has a key.
    #[test]
    fn no_text_has_a_key() {
        let authority = authority(&["api.example.com"]);
        let pem = authority.certificate_pem();
        assert!(pem.starts_with("-----BEGIN CERTIFICATE-----") && !pem.contains("KEY"), "{pem}");
        let shown = format!("{:?}", authority.server_config("api.example.com").unwrap());
        assert!(shown.contains("api.example.com") && !shown.contains("signer"), "{shown}");
    }
}
