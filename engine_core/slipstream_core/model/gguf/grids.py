"""The grids of GGUF's types of 2 and 3 bits: 4 or 8 values for each code of 8 to 10 bits.

They are part of the format, in ggml's `ggml-common.h` (MIT). A value is the number of a magnitude,
of which `kernels/codes/formats.py` has the sizes; here it has 2 or 3 bits, the highest first.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
import numpy.typing as npt


@cache
def grid(name: str) -> npt.NDArray[np.uint8]:
    """The grid of a type, [codes, values]."""
    bits, width, packed = _GRIDS[name]
    flat = np.unpackbits(np.frombuffer(base64.b85decode(packed), np.uint8)).reshape(-1, bits)
    weights = np.uint8(1) << np.arange(bits - 1, -1, -1, dtype=np.uint8)
    values: npt.NDArray[np.uint8] = (flat * weights).sum(axis=1, dtype=np.uint8)
    return values.reshape(-1, width)


# by name: bits of a value, values of a code, and all of them in base 85
_GRIDS = {
    "IQ2_XXS": (
        2,
        8,
        (
            "004jhPyiqRpa4Vw6aWYShyW-6r~p9#5dZ}MB>+hP82|zRf&iibiU2@B5I_V#R6qeh5<n(E0Dypih=78CKoAfR1Q1"
            "9N7!Uyvfe;}O2@paM5)cLu8V~?bfKVV%2vCtwX;1=CMo?go1dsuc5|A2@03c8xARrVVC?G)~5g-L1g&-mz5MTjdf"
            "S?qhKm-s31O!L~0R#yI5(EYWRs;Y<AVdg61w^Gp0z?>uQG@^#AQT7`SQKFt0u&@viBtfTl$1au5F`X70VF~s0Ax^"
            "P3S>p300@8xpa>BNNeBW6f(U3xAxHp-fQUdC5Euj)0T`7S09Zj-8CV9GASehZ7AO&@KmiZ|1OX%gNC6lD0RbTal>"
            "rF>LIDy11_1y;2ti3f0zpziK!F5-A%T^FDS-eHAQ1==0ug2rgi#n#0Fgi;5FrF10U=Q#0AVFzNnwIvQK1H*00kfg"
            "L<M982n7NKA_WjdfkhfcMui3yh83VyK$R7h03}2vWF;9T0c9Yi5D5ec0SPGy07+FzB#8-$02xpj1X+Yx5?O&M00M"
            "vlpaMYxf&vgiBtii~M1nvP5E29uR1yIa2@(KOkx~{?V3Gln36g*!5Mo545C#MW7zP0bN(Pih0!C4W02YWA5f(*OL"
            "M8}ifC>c)QVL*70E#3U1u76~"
        ),
    ),
    "IQ2_XS": (
        2,
        8,
        (
            "004jhPyiqRpa4Vw6abU}WB>>NhyYjsC;&kK5de_@VE_dHg#c9mB>+hP82|zRf&fwgA^=7J764`d3IISr5I~SXU_b"
            ";wgg{h4BtWD<NI)1s0YHI3Q9vO;ML-om2|y`8LO>Eg20#FSfPhedAb>=G6o3eTL4Xl}1%Oq60)V1`KoAfRkPu)H1"
            "Q3J}R1hQ(NDvqh0T6)@Q4k>zMGzGbl@JLKLJ$%V1`q&HfKX6SAW%e56i^6IK~ND;1yD&)0#HDZ5Re3rn2-UGfshi"
            "A03d)MP#_>6pddsb6d(v7SRg?l5g-L1B_IMI3LvT=KwuDH1YiMRLSSNG0H6q<D4>?03ZOs)5Co6}U<3pNgalLsBm"
            "_tV7z6<Xfdo+mAp}JP6$A+csRTj<5(EYW07QU9P(&a^L_`!s2t+|d5kv(<0z?)>mP9~=5QLC~1cU*E34{O?fD}*^"
            "AQVIt6ch*)K@<@bVH5=v859B(KvWP^1XKZ30F)GzVU$255F`X7gd_nZ6(o`*0Ax^PnPf$zYNP-NfCx|sAPArcL<k"
            "fJ2naz45eNkc0tgBSKu8cs1V{l$AxK$B0Emc)0*ESzKo}4h1Q=)-0T=*SL0E-YW>`R&q?nqR04N|RpeP6^RVX4Ti"
            "YO^)252Ct2&jUnBB-LMKmiZ|kO5!;1ObErQ~@LbNC6lD0Re#lQ2`+Vp#en!6#)qWSph-;5&;GQ06~C3P(dI;L_ri"
            "m2th$X5kUn(0zpziia|hu5P<}Ngn?**0f7J!fDup;AQ40n6cJ<*2oXUM5fKFu0udGwKv57;1W_1K0a2z=0Fj`P5s"
            "?LvKp_wz1R((-Q6Uu}i6H=CL}3wO1z~An5TO7CfCW$mAO%DP6a@$cC<Q?U5d{SW0tG-t5Jdz<R7C+rfkgm?5rwLS"
            "Kot-b1QkdX0Tl@qLKR9C097DW0#zbaNR=s-N|gX56eU3=1tn%Bq-6nRfn`#qKnV~D1PK8N6$yz6k_l=F07)2$p^1"
            "ix02!1S1X%%DQCS*UKq;vySZR={6{(4-00MvlPy!$VL;@572m+`AK>`s11p)#Bf&wZ6sscbl5JHeb1VRBqMM7ml0"
            "D=gD0)m2q3W6$vKoSrV1QLW2R1yIa2@+xw08$ZBT2dsEsgeL9AR<^Ir6K|%f+8v+kYb3U0-_?KmZB=6Kn4&71O@>"
            "Hl?D<907i&L8Ag?cVuk<~P!<su1r{Y1XjTSRhE_qAMJAdiVP;gO38nxFfC?ZApb7{Is0s=SMM`B#no0nQfQlfBsE"
            "PuL3W@<5RvKBFCYqos2r7swC@KmnDk>0a5^9oaD5|KcMyjf+"
        ),
    ),
    "IQ2_S": (
        2,
        8,
        (
            "004jhPyiqRpa4Vw6abU}WB>>NhyYjsC;&kK5de_@VE_dHg#c9mB>+hP83368X#fHMf&fwgA^=7J761wWS^%m5KtK"
            ">ckU(HS1VDs9R6ry^NI)1s0YHI3Q9vO;ML-oml|W@c2|!suDL_I%5<mt(hCo(8N<bPw0DypiP=FwSM1T~42!N=7L"
            "4Xl}k$_=<1%Oq60)SG0qJS2Fihw{65D<_MU=Rclgb-8^BoIgt7!a5cXb=Gqfe=v;ArPSuMGzGbl@MhR2@r`8Sr9@"
            "H5)hIQVh{!pRuCo-N)Q?l08oHXP*5OHpio3m6i}2<WKalDSWqZXK~ND;kx*e!1yF@hRZt~RNl+P30#JfbQcxmLMo"
            "<<|3Q$0h5Rj0NV2}imRFDCXQIH{!MUWMc36MgN5|9Rv03d)MP#_>6L?9F(lptgv2q0J>s31Wg5g?HuVITz{g&<WR"
            "B_K&486W~6QXm!}svtmM5MTsggkV%)Bw$Ej0bo&JAz(#d6<`TqLSP190H8#m6rhNpD4?jI1)yf2Km-s3kOW`^1O$"
            "WxR0JdhNCX%Jm;?a?fdo+mAp}JP6$F(8WdsQXi3C{$DFi|U5(JV21_V|FCIm_Z8Uz4DfJ9J4AVi=<L_`!sltg4i2"
            "t<fPSVSm9K|~Qmkwjrc1w@5JRYWC3Nkkb$0z`sDQbZy|Mno1wK!gy4V1xvORD?)`7=!_YQG`W=6@)^B5`+eX02F`"
            "}P!u2(L=+ShloVtX2ozWpC=@{y5fqUWVH5=vg%nj3B@{^%859B(f)r8|A{0gx78D8;KvWP^kW^q)1XP4nR8%BXNK"
            "_b90aSrhQB)yRMN}132~<K<5>y6M0F+RaAe2Ou6qE>*L6i}c1(X7ms+2$^5G0T!U?c=2R3s!MNF)Iyfh18RAtXg4"
            "6(k8HLL?F-0Azq<P-GxvL}V0X2xLKI5o85qX=I9I5Tpd80i>0r00@8xPzWFhL<kfJln7)92nbjRs0cv_5eNkcg$P"
            "v$83+Ohq6iiUst7<x5J&__gh*6KNJs%lfk;tEMMxD$2}nXn5=aI}0EnQ7h=?eNsE84W1&AVuqKGPpKo}4hkQiVX1"
            "Q=8pBp65-7#IN<ff!L3As9s%6&MK^LKqSl1{eTXP*@;XL|7D92v|W_5m*ISnOFi?K$sAi1egJsWtadcP$)zw6evL"
            "`5hw*HqA02;KxhzX1ZY-hps0wb8K@$tqNqRt5CM<@U;zXHgaK3mBmtxWNC6lDm;nI+fdNqgApxNQMFAB7l>ub|2?"
            "2=#Sph-;5&;GQRskjfN&y-H06~C3P(dI;L_rimltE-c2tkNJSV2KS5kZkbVL=5!g+Wz8B|%9+89@R;f<aP2B0)w$"
            "7C{O@K!Ff}1c8KsRDmRc7=ZzSQGp?WMS&H834ua^5`h2_fDup;AQ7MuL=hAblo4bR2oZ=8SP>`@K@kxVkr81L1rd"
            "c2RS_i-Nf8+l0uh1{QV}8%MiCYf3K2k25K)j(U{M57gi%ycBvD9F7*PRHfl*OWAyGw96;TOMsZl~v5>W<G0Fi)^P"
            ">~>!M3EGc2$4aN5s?Lv0+CvgKp_wzU?Bt{gdtQRBq2y47$E^6fgw>LAt6N}6(I>B5+Md50AYY(P+=fpL}3(R2w_2"
            "C5n%;k0%4Y6K%o$!1fc<;00n>rPz4|bL<JNDlm%o32nC1*SOq8rK?M;7kp*D|1qFo#RRtvlNd*}N0tJEvQUxLfMg"
            "<lHKt&KmkVRlc1Vw~JR7E63NJSV$0Y!mDQAHs|MMV`w2}MFh5=90@0EJM6AcaJQ6om+dL4^^81%+va0);>o5EYOW"
            "U=;)vgcVd3Bo#;%7!?5(ffZ2|Ar(ax6%`2;LKPAf1{DBRfK^acAXP+F6jcaSK~)h|1yur7K$Q@c1eKVT0hItHfF)"
            "2RASFa46eS2HK_w9-1tp~=0wq9Y5M=~q0c8NCWTjH2Dy2XP5DAb81PO!*R0$*rNC_AT0SQqFAqhnZ6$uFm5(x$g0"
            "7-yJP)Q(3L`f7$2uVRn5lIC}0!d~`5Qzkd0g07~N{Ij&P#GW@L>Uwr2pK^c5g7#;0vSMA5LpCS0a>A0DOrYD0GSq"
            "<Kq(L@1Swf5CMf`EsA++zN~r(>fC5kgAOb`J6ar)d2m)9FK>`s11p<WvRRSdfNdf`_QUXQ-76L#*5JF%=1VV&DR6"
            "-;|NJ1Dw0YZU7Q9>a?MM4!qLP8Qk2105=0D@40pn^n#6oNs55rPGRKoSrVkP=`L1QLW2R1zc-ND=`Off7*?AreIr"
            "6%q*&LJ|@Z1`+^LfKpIWAW}q96jBIMK~fP?1yTZ1qEbMT5RwFvXp#Yv03uK#L?RR-K_U?%1tN+fKw=PL0b*HVh@v"
            "H;rJ{nOilRUU5C&id1O|i#R0bpl7zP0bfd)|qAqGVT6$S|gLIx5B1_l5|P)0;X6h=Wt5k>_@rA9!85QYSX0fw4}0"
            "2Y82P!=E-L>3el2o^yW5f%j&0v47QKvob|1Xcl7CRR#T0G5%K8J0jM5GDjBm?i-xY9;_?VP=J92BrWCPzs<56bgt"
            "6s0u*}5efwgiVCU<0ZLg)fQq1sh>9qRsEUG$B8sAlDvCfF5E=v;0UBZ&8X5pvWLia<peiUTiYgUql4>BTpsEO}h^"
            "i>6BC4vY"
        ),
    ),
    "IQ3_XXS": (
        3,
        4,
        (
            "00aPl0zhOAKnMhYECm333&0?T2n2*kD2j*-gvc<7NF0C=K?o2f0FX%n&}|OTH4jj|0vO?dSVfAM9fn};2_W_d;Jy"
            "MV;)Li{itw8Nc!!L5bAz}b76AklK`0i13>3kP9|05)2|$ub2$YE-77+y$Q7I77T@V>TkeMx=8QGE{q7h*Vn5oi}>"
            "7x|66OaNxB0^*!f=DcaEF}UUrV5~-N<^ZH45y0tp~?Xy5+yED2_%y3AriGB8U?6Y9jV%`Ct_l*sxqnSBc?jXt2!V"
            "sLqsxzXfZ>$HNyb33kb5yki82bHWLLplT|g-CAQlRKO<f+E5fv^wzzZ8H?wcCyMRtatWLyqPeh!+l<h$j8BLVo%N"
            "&A3WSUB>a>4AQz<fu*{6td)98e9w+>Nx@RZUgZLDyXdR;B7y<wDZ!7g)Vh*oKg82AE=wIPO-NVBXE?CZgqTZ)QF#"
            "<_DmD2LyD-RD6#R^jEQUR{{E8ZSkKfb0-4yFN*N@"
        ),
    ),
    "IQ3_S": (
        3,
        4,
        (
            "00IC&3IN~$KqLe}gbY9k0)VInzz_uhunzz<2S6AFfIJDn`~V0bgb09uNF<6#2!@F0g2=3i2sn#~T!0WE3J~D{P-P"
            "5IDGHDc2+&ar5b*<0bpg<Q1{fuZSP6ufEr!_5i5L}ySowq4y?`KQ4qz$>piTiGasyx<1So=ls7j2eZi6VYk0{!Q="
            ")(eVX9Dn71MmZcID>$=ON_X0fq0jI0U#6sfDl0>7D1#QK?oFqEEvJe89~$&fm{#?AeIThkV%A+i42y>Fp)`Ak;&Y"
            "U5k(qN<q(mH6wwhE5w#JKT@o3Ao*4y}St*{G4Vc+6m6;uuA)*vvh7#d!6(Q0QVU`jp29{|mkm*j7X$u&!>lrcA5;"
            "<d#c}J4Duah}jk@)~30$?fv;2=UoC_=;{f@m&+3?#xZCjzh`LR2q;94ErOAPPXBN@T7|NUDk~sLD{IN+Bo`;Ubc0"
            "Akyt45_K<9Jt@)wq#B{3T1lvyEvDL0p<3CZBH|#TY9!*WBO+ca;)0@TO0Mb>r)nOcGD9vhD=Tt4Dmo{ux(}y17o-"
            "CuHbbO7Lr5~iY&yeGIRo%BLwGa8AhrvjxJxLuix9DkT)oQyG*byQ(~U7xA+TG8vYTnXn+>xYalae2x7%VeW5zV2E"
            ";VBsIin)5Yeu@OPPr@Ax9i6<Gb6S;3$(khumpfaL<mTP=tRUYK|~xx4B)~{WW<aN%FJ-XOtiujVL()+LX>Sm6!k@"
            "v9Y`D{##{-+oGr@S0z@Q=PUI3p<f6_jD#fg4Nc0;(e5b(tbHjW<P(_4Pg%DW<@Kr_FS;ZjM4WQIbDAdhd&=n<Cl?"
            "`0gbyOYU&|T@-9W~pXebOa@P^C^?B}Uw>HrH)aR6T>#y(DHvq+-TwVTJ(Uj_B!*MQGMhYgSod)&b~VDd8TfXC_);"
            "E@J5J8tOI^Vt!}f2Y`MD2y}<caR-!jhd}aAi1!b$@)v<{SH*Id4RcpP^xv)bUm|)ZW^kt#bgxqMH!pBM"
        ),
    ),
}
