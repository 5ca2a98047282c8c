//! A certificate authority for tests.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use tempfile::TempDir;

/// A CA and the file of its certificate.
pub(crate) struct TestCa {
    issuer: CertifiedIssuer<'static, KeyPair>,
    pub(crate) file: PathBuf,
    place: TempDir,
}

/// The two files of a server or client with a certificate.
pub(crate) struct CertificateFiles {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl TestCa {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self::with_issuer(
            CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        )
    }

    fn with_issuer(issuer: CertifiedIssuer<'static, KeyPair>) -> Self {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("ca.pem");
        fs::write(&file, issuer.pem()).unwrap();
        Self { issuer, file, place }
    }

    pub(crate) fn server(&self, name: &str, protocols: &[&str]) -> rustls::ServerConfig {
        let (certificate, key) = self.issue(name);
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let mut config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }

    /// Makes a server that shows a self-signed certificate, as `openssl req -x509` makes one, and returns the
    /// certificate as an authority.
    pub(crate) fn self_signed_server(name: &str) -> (Self, rustls::ServerConfig) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let own = Self::with_issuer(issuer);
        let key = PrivatePkcs8KeyDer::from(own.issuer.key().serialize_der());
        let mut config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![own.issuer.der().clone()], key.into())
            .unwrap();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        (own, config)
    }

    /// Makes a certificate for `name` and its key.
    pub(crate) fn files(&self, name: &str) -> CertificateFiles {
        let (certificate, key) = self.issue(name);
        let write = |ending: &str, pem: String| {
            let path = self.place.path().join(format!("{name}.{ending}"));
            fs::write(&path, pem).unwrap();
            path
        };
        CertificateFiles {
            certificate: write("crt", certificate.pem()),
            key: write("key", key.serialize_pem()),
        }
    }

    /// Makes a TLS client that trusts this CA, with a client certificate if files are given.
    pub(crate) fn client(
        &self,
        own: Option<&CertificateFiles>,
        protocols: &[&str],
    ) -> rustls::ClientConfig {
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};
        let builder =
            rustls::ClientConfig::builder().with_root_certificates(read_roots(&self.file));
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(files) => {
                let certificate = CertificateDer::from_pem_file(&files.certificate).unwrap();
                let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
                builder.with_client_auth_cert(vec![certificate], key).unwrap()
            }
        };
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }

    fn issue(&self, name: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }
}

fn read_roots(file: &Path) -> rustls::RootCertStore {
    cogni_gateway::base::tls::load_root_store(file).unwrap()
}
